"""One predicate per constraint on arrays; each raises with what came and what is allowed."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

import jax.numpy as jnp

from dgmoe_jax import layouts
from dgmoe_jax.recipes import BESIDE, READS, is_read_by, padded, run_of, runs_of


def count(name: str, value: int, least: int) -> int:
    """`value` as an int of at least `least`."""
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be an int")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be an int, known when tracing") from None
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")
    return value


def shape(name: str, array, expected: Sequence[int | None]) -> None:
    """`array.shape` equals `expected`, None standing for any size."""
    if not hasattr(array, "shape"):
        raise TypeError(f"{name}: {type(array).__name__}, must be an array")
    got = tuple(array.shape)
    if len(got) != len(expected) or any(
        e is not None and g != e for g, e in zip(got, expected, strict=True)
    ):
        want = ", ".join("*" if e is None else str(e) for e in expected)
        want += "," if len(expected) == 1 else ""
        raise ValueError(f"{name}: shape {got}, must be ({want})")


def dtype(name: str, array, allowed: Sequence[str]) -> None:
    """`array.dtype` is one of `allowed` (names)."""
    if jnp.dtype(array.dtype).name not in allowed:
        raise TypeError(
            f"{name}: dtype {jnp.dtype(array.dtype).name}, must be {' or '.join(allowed)}"
        )


def tokens(x, hidden_size: int) -> None:
    """x is [T, H] bf16."""
    shape("x", x, (None, hidden_size))
    dtype("x", x, ("bfloat16",))


def valid(valid, num_tokens: int) -> None:
    """valid is [T] bool, or None."""
    if valid is not None:
        shape("valid", valid, (num_tokens,))
        dtype("valid", valid, ("bool",))


def hash_lookup(token_ids, hash_table, num_tokens: int, top_k: int) -> None:
    """token_ids is [T] int32 and hash_table [vocab, k] int32, as hash selection needs."""
    for name, array in (("token_ids", token_ids), ("hash_table", hash_table)):
        if array is None:
            raise ValueError(f"{name}: missing, with router.selection='hash'")
    shape("token_ids", token_ids, (num_tokens,))
    dtype("token_ids", token_ids, ("int32",))
    shape("hash_table", hash_table, (None, top_k))
    dtype("hash_table", hash_table, ("int32",))
    if hash_table.shape[0] == 0:
        raise ValueError(f"hash_table: shape {hash_table.shape}, must have at least one row")


def expert_map(expert_map, total: int):
    """expert_map is [total] or [C, total] int32 with C > 0; returned as [C, total]."""
    if getattr(expert_map, "ndim", None) == 1:
        shape("expert_map", expert_map, (total,))
        expert_map = expert_map[None]
    shape("expert_map", expert_map, (None, total))
    dtype("expert_map", expert_map, ("int32",))
    if expert_map.shape[0] == 0:
        raise ValueError(f"expert_map: shape {expert_map.shape}, must have at least one copy")
    return expert_map


def routing(topk_ids, topk_weights, num_tokens: int | None) -> None:
    """topk_ids and topk_weights are [T, k] int32 and f32; any T where it is None."""
    shape("routing.topk_ids", topk_ids, (num_tokens, None))
    shape("routing.topk_weights", topk_weights, topk_ids.shape)
    if topk_ids.shape[1] == 0:
        raise ValueError(f"routing.topk_ids: shape {topk_ids.shape}, must have at least one slot")
    dtype("routing.topk_ids", topk_ids, ("int32",))
    dtype("routing.topk_weights", topk_weights, ("float32",))


def arch(arch) -> None:
    """An architecture as `plan` and `prepare_params` take it."""
    if not isinstance(arch, str) or not re.fullmatch(r"cpu|gpu|sm\d+", arch):
        raise ValueError(f"arch={arch!r}: must be 'cpu', 'gpu' or 'sm90', 'sm100', ...")


def params(params, cfg, part=None) -> None:
    """`params` were prepared for `cfg`: the same padded sizes, recipe and shared experts. `part`
    (`parallel.Share`): they are one rank's."""
    split = None if part is None else part.split
    if params.split != split:
        raise ValueError(
            f"params: {params.split or 'whole'}, must be {split or 'whole'}: shard_params splits"
            " what prepare_params returned, for one Parallel and one mesh"
        )
    hidden, fmt = padded(cfg.hidden_size), params.experts.w13.format
    if run_of(cfg.recipe, fmt) is None:
        known = sorted({run.operands.weights.name for run in runs_of(cfg.recipe)})
        raise ValueError(
            f"params.experts.w13: format {fmt.name!r}, must be {' or '.join(map(repr, known))} for"
            f" recipe={cfg.recipe!r}"
        )
    shape("params.gate_weight", params.gate_weight, (cfg.num_experts, cfg.hidden_size))
    if params.gate_bias is not None:
        shape("params.gate_bias", params.gate_bias, (cfg.num_experts,))
    if params.shared_gate_weight is not None:
        shape("params.shared_gate_weight", params.shared_gate_weight, (1, cfg.hidden_size))
    cfg = cfg.as_grouped()
    if (params.shared is None) != (cfg.num_shared_experts == 0):
        given = "missing" if params.shared is None else "given"
        raise ValueError(
            f"params.shared: {given}, with num_shared_experts={cfg.num_shared_experts}"
        )
    num_experts, inner = cfg.num_experts, padded(cfg.intermediate_size)
    shared_inner = padded(cfg.num_shared_experts * cfg.intermediate_size)
    if part is not None:
        num_experts, inner, shared_inner = part.experts, part.inner, part.shared_inner
    blocks = [("experts", params.experts, num_experts, inner, fmt)]
    if params.shared is not None:
        own = params.shared.w13.format
        beside = cfg.recipe in BESIDE and run_of(BESIDE[cfg.recipe], own)
        blocks.append(("shared", params.shared, 1, shared_inner, own if beside else fmt))
    for name, block, num_experts, inner, fmt in blocks:
        size = {"w13": (2 * inner, hidden), "w2": (hidden, inner)}
        for operand, (n, k) in size.items():
            weight, where = getattr(block, operand), f"params.{name}.{operand}"
            if weight.format != fmt:
                raise ValueError(
                    f"{where}: format {weight.format.name!r}, must be {fmt.name!r} for"
                    f" recipe={cfg.recipe!r}"
                )
            shape(where, weight.values, (num_experts, *fmt.values_shape(n, k)))
            dtype(where, weight.values, (fmt.dtype,))
            if fmt.group is not None:
                scales = (num_experts, *fmt.scales_shape(n, k))
                shape(f"{where}.scales", weight.scales, scales)
                dtype(f"{where}.scales", weight.scales, (fmt.scales_dtype,))


def readable(params, cfg, backend: str) -> None:
    """`backend` reads `params` as they are stored."""
    blocks = (params.experts, params.shared)
    for fmt in {block.w13.format for block in blocks if block is not None}:
        recipes = (cfg.recipe, BESIDE.get(cfg.recipe, cfg.recipe))
        if any(is_read_by(backend, recipe, fmt) for recipe in recipes):
            continue
        scales = "packed" if fmt.packed_scales else "f32"
        raise NotImplementedError(
            f"backend={backend!r} does not read params' {fmt.name!r} weights with {scales} scales;"
            f" prepare_params(raw, cfg, arch=...) lays them out for it with one of {READS[backend]}"
            f" and cfg.backend={backend!r}"
        )


def plan(plan, num_experts: int, most, distinct: bool) -> None:
    """`plan` holds every routing of this call, of `most` (`plan.Load`): fewer rows would be written
    past their end. `distinct`: no token can name an expert twice."""
    if plan.layout == "contiguous":
        least = layouts.contiguous_rows(most.assignments, num_experts, plan.alignment)
        if plan.rows < least:
            raise ValueError(f"plan.rows={plan.rows}: must be at least {least} for this call")
        return
    least = most.per_expert
    if plan.capacity < least:
        unless = "" if distinct else ", or distinct_ids=True promised to plan()"
        raise ValueError(
            f"plan.capacity={plan.capacity}: must be at least {least} for this call{unless}"
        )
    if plan.rows != num_experts * plan.capacity:
        raise ValueError(
            f"plan.rows={plan.rows}: must be capacity={plan.capacity} for each of {num_experts}"
        )


def instance(name: str, value, cls: type, hint: str) -> None:
    """`value` is a `cls`."""
    if not isinstance(value, cls):
        raise TypeError(f"{name}: {type(value).__name__}, must be a {cls.__name__} {hint}")
