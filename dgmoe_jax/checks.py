"""One predicate per constraint on arrays; each raises with what came and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from dgmoe_jax.recipes import RECIPES, padded


def shape(name: str, array, expected: Sequence[int | None]) -> None:
    """`array.shape` equals `expected`, None standing for any size."""
    got = tuple(array.shape)
    if len(got) != len(expected) or any(
        e is not None and g != e for g, e in zip(got, expected, strict=True)
    ):
        want = ", ".join("*" if e is None else str(e) for e in expected)
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


def routing(topk_ids, topk_weights, num_tokens: int) -> None:
    """topk_ids and topk_weights are [T, k] int32 and f32."""
    shape("routing.topk_ids", topk_ids, (num_tokens, None))
    shape("routing.topk_weights", topk_weights, topk_ids.shape)
    if topk_ids.shape[1] == 0:
        raise ValueError(f"routing.topk_ids: shape {topk_ids.shape}, must have at least one slot")
    dtype("routing.topk_ids", topk_ids, ("int32",))
    dtype("routing.topk_weights", topk_weights, ("float32",))


def params(params, cfg) -> None:
    """`params` were prepared for `cfg`: same sizes, recipe and shared experts."""
    hidden, fmt = padded(cfg.hidden_size), RECIPES[cfg.recipe].weights
    shape("params.gate_weight", params.gate_weight, (cfg.num_experts, cfg.hidden_size))
    blocks = [("experts", params.experts, cfg.num_experts, cfg.intermediate_size)]
    if (params.shared is None) != (cfg.num_shared_experts == 0):
        given = "missing" if params.shared is None else "given"
        raise ValueError(
            f"params.shared: {given}, with num_shared_experts={cfg.num_shared_experts}"
        )
    if params.shared is not None:
        blocks.append(("shared", params.shared, 1, cfg.num_shared_experts * cfg.intermediate_size))
    for name, block, num_experts, inner in blocks:
        sizes = (2 * padded(inner), hidden), (hidden, padded(inner))
        for operand, weight, (n, k) in zip(
            ("w13", "w2"), (block.w13, block.w2), sizes, strict=True
        ):
            if weight.format != fmt:
                raise ValueError(
                    f"params.{name}.{operand}: format {weight.format.name!r}, must be"
                    f" {fmt.name!r} for recipe={cfg.recipe!r}"
                )
            shape(f"params.{name}.{operand}", weight.values, (num_experts, n, k // fmt.packed))


def plan(plan, least_rows: int) -> None:
    """`plan` holds every routing of this call: fewer rows would be written past their end."""
    if plan.rows < least_rows:
        raise ValueError(f"plan.rows={plan.rows}: must be at least {least_rows} for this call")
