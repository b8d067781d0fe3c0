"""`prepare_params`: validate, quantise, pad. Paid once, expert by expert."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dgmoe_jax import checks
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.quantize import quantize
from dgmoe_jax.recipes import RECIPES, RUNS_ON, Format, padded
from dgmoe_jax.types import ExpertWeights, MoEParams, Scaled

_REQUIRED = ("gate_weight", "w13", "w2")
_OPTIONAL = ("gate_bias", "w13_scale", "w2_scale", "hash_table")
_SHARED = ("shared_w13", "shared_w2", "shared_w13_scale", "shared_w2_scale", "shared_gate_weight")
_FLOATS = ("bfloat16", "float16", "float32")


def prepare_params(raw: Mapping[str, Any], cfg: MoEConfig, *, arch: str | None = None) -> MoEParams:
    """Checkpoint arrays -> `MoEParams` for `moe_layer`.

    Args:
      raw: `gate_weight` [E, H]; optional `gate_bias` [E]; `w13` [E, 2I, H], gate rows then up
        rows; `w2` [E, H, I]; with `num_shared_experts` S > 0 also `shared_w13` [2SI, H], all gate
        rows then all up rows, `shared_w2` [H, SI], and optional `shared_gate_weight` [1, H], whose
        sigmoid weighs the shared experts' sum (Qwen2-MoE). Weights in bf16, f16 or f32 are
        quantised to `cfg.recipe` here. Weights that are already float8_e4m3fn ("fp8_block") come
        with `*_scale` f32 per 128 x 128 block, `w13_scale` [E, 2 * ceil(I / 128), ceil(H / 128)]
        (gate blocks, then up blocks) and `w2_scale` [E, ceil(H / 128), ceil(I / 128)], and keep
        them. Fused shared experts become experts E, E + 1, ... of the same block of weights.
        Hash selection also needs `hash_table` [vocab, k] int32 or int64 of experts' ids.
      arch: the architecture to lay out for ("cpu", "sm90"); None means any that runs the recipe.

    Returns:
      Params with H and I padded to multiples of 128 by zeros.

    Raises:
      ValueError, TypeError: a missing or unknown name, a shape or dtype that does not fit `cfg`.
      NotImplementedError: a recipe that does not run on `arch`.
    """
    if not RUNS_ON[cfg.recipe] or (arch is not None and arch not in RUNS_ON[cfg.recipe]):
        runs = sorted(r for r, a in RUNS_ON.items() if (arch in a if arch else a))
        where = f" on {arch}" if arch else ""
        raise NotImplementedError(f"recipe={cfg.recipe!r} does not run{where} yet; {runs} do")
    _check_names(raw, cfg)
    fmt = RECIPES[cfg.recipe].weights
    num_experts, hidden, inner = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size
    gate_weight = jnp.asarray(raw["gate_weight"])
    checks.shape("gate_weight", gate_weight, (num_experts, hidden))
    checks.dtype("gate_weight", gate_weight, _FLOATS)
    gate_bias = raw.get("gate_bias")
    if gate_bias is not None:
        gate_bias = jnp.asarray(gate_bias)
        checks.shape("gate_bias", gate_bias, (num_experts,))
        checks.dtype("gate_bias", gate_bias, _FLOATS)
        gate_bias = gate_bias.astype(jnp.float32)
    experts = _weights(raw, "", (num_experts,), hidden, inner, fmt)
    shared, count = None, cfg.num_shared_experts
    if cfg.router.fused_shared_experts:
        fused = _weights(_one_by_one(raw, cfg), "shared_", (count,), hidden, inner, fmt)
        experts = jax.tree.map(lambda *pair: jnp.concatenate(pair), experts, fused)
    elif count:
        shared = _weights(raw, "shared_", (), hidden, count * inner, fmt)
    shared_gate = raw.get("shared_gate_weight")
    if shared_gate is not None:
        shared_gate = jnp.asarray(shared_gate)
        checks.shape("shared_gate_weight", shared_gate, (1, hidden))
        checks.dtype("shared_gate_weight", shared_gate, _FLOATS)
    table = _hash_table(raw, cfg)
    return MoEParams(gate_weight, gate_bias, experts, shared, table, shared_gate)


def _one_by_one(raw: Mapping[str, Any], cfg: MoEConfig) -> dict[str, Array]:
    """The shared experts' block, cut: shared_w13 [S, 2I, H], shared_w2 [S, H, I], and scales."""
    count, hidden, inner = cfg.num_shared_experts, cfg.hidden_size, cfg.intermediate_size
    checks.shape("shared_w13", raw["shared_w13"], (2 * count * inner, hidden))
    checks.shape("shared_w2", raw["shared_w2"], (hidden, count * inner))
    given = {name: jnp.asarray(raw[name]) for name in _SHARED[:4] if raw.get(name) is not None}
    if len(given) > 2 and count > 1 and inner % 128:
        raise NotImplementedError(
            f"shared_w13_scale: blocks of 128 rows span two fused shared experts of {inner};"
            " fused_shared_experts=0 runs"
        )
    for name, x in given.items():
        if name.startswith("shared_w13"):
            x = x.reshape(2, count, -1, x.shape[-1]).swapaxes(0, 1)
            given[name] = x.reshape(count, -1, x.shape[-1])
        else:
            given[name] = x.reshape(x.shape[0], count, -1).swapaxes(0, 1)
    return given


def _hash_table(raw: Mapping[str, Any], cfg: MoEConfig) -> Array | None:
    if cfg.router.selection != "hash":
        return None
    table = jnp.asarray(raw["hash_table"])
    checks.shape("hash_table", table, (None, cfg.router.top_k))
    checks.dtype("hash_table", table, ("int32", "int64"))
    if table.size and not isinstance(table, jax.core.Tracer):
        low, high = int(table.min()), int(table.max())
        if low < 0 or high >= cfg.num_experts:
            raise ValueError(
                f"hash_table: ids {low}..{high}, must be in [0, {cfg.num_experts}), num_experts"
            )
    return table.astype(jnp.int32)


def _check_names(raw: Mapping[str, Any], cfg: MoEConfig) -> None:
    shared = _SHARED if cfg.num_shared_experts else ()
    by_hash = cfg.router.selection == "hash"
    needed = (*_REQUIRED, *shared[:2], *(["hash_table"] if by_hash else []))
    missing = [n for n in needed if raw.get(n) is None]
    if missing:
        raise ValueError(f"raw: missing {missing}")
    unknown = sorted(map(str, set(raw) - {*_REQUIRED, *_OPTIONAL, *shared}))
    if unknown:
        hint = "" if shared else " (shared_* needs num_shared_experts > 0)"
        if any(name.endswith("_scale_inv") for name in unknown):
            hint += " (a checkpoint's *_scale_inv is *_scale here: the factor that dequantises)"
        raise ValueError(
            f"raw: unknown {unknown}, must be in {[*_REQUIRED, *_OPTIONAL, *_SHARED]}{hint}"
        )
    if raw.get("hash_table") is not None and not by_hash:
        raise ValueError("raw['hash_table']: given with router.selection='scores', needs 'hash'")


def _weights(
    raw: Mapping[str, Any], prefix: str, lead: tuple[int, ...], hidden: int, inner: int, fmt: Format
) -> ExpertWeights:
    """`lead` is (E,) for experts and () for a dense block, which becomes the only expert of one."""
    # Gate and up are padded apart, so that each half still starts on a scale block.
    return ExpertWeights(
        _operand(raw, f"{prefix}w13", lead, (2, inner, hidden), fmt),
        _operand(raw, f"{prefix}w2", lead, (1, hidden, inner), fmt),
    )


def _operand(
    raw: Mapping[str, Any],
    name: str,
    lead: tuple[int, ...],
    size: tuple[int, int, int],
    fmt: Format,
) -> Scaled:
    parts, n, k = size
    weight, scale = jnp.asarray(raw[name]), raw.get(f"{name}_scale")
    checks.shape(name, weight, (*lead, parts * n, k))
    encoded = fmt.group is not None and weight.dtype == fmt.dtype
    if encoded and scale is None:
        raise ValueError(f"{name}: dtype {weight.dtype} without {name}_scale")
    if scale is not None and not encoded:
        takes = f"{fmt.dtype} weights" if fmt.group else "no recipe but a quantised one"
        raise ValueError(
            f"{name}_scale: given with {name} of dtype {weight.dtype}; goes with {takes}"
        )
    if not encoded:
        checks.dtype(name, weight, _FLOATS)
        return _encode(weight.reshape(-1, parts * n, k), size, fmt)
    scale = jnp.asarray(scale)
    blocks = (parts * -(-n // fmt.group[0]), -(-k // fmt.group[1]))
    checks.shape(f"{name}_scale", scale, (*lead, *blocks))
    checks.dtype(f"{name}_scale", scale, ("float32",))
    weight = _pad(weight.reshape(-1, parts * n, k), size)
    return Scaled(weight, scale.reshape(-1, *blocks), fmt)


@functools.partial(jax.jit, static_argnames=("size", "fmt"))
def _encode(weight: Array, size: tuple[int, int, int], fmt: Format) -> Scaled:
    if fmt.group is None:
        return Scaled(_pad(weight, size).astype(fmt.dtype), None, fmt)

    def one_expert(w: Array) -> tuple[Array, Array]:
        scaled = quantize(_pad(w[None], size)[0], fmt)
        return lax.bitcast_convert_type(scaled.values, jnp.uint8), scaled.scales

    # lax.map keeps the f32 copy that quantising needs to one expert at a time. It stacks bits,
    # since XLA on a CPU converts a whole stack of float8 to another float at every step.
    values, scales = lax.map(one_expert, weight)
    return Scaled(lax.bitcast_convert_type(values, fmt.dtype), scales, fmt)


def _pad(weight: Array, size: tuple[int, int, int]) -> Array:
    parts, n, k = size
    if n == padded(n) and k == padded(k):
        return weight
    tails = ((0, 0), (0, 0), (0, padded(n) - n), (0, padded(k) - k))
    return jnp.pad(weight.reshape(-1, *size), tails).reshape(-1, parts * padded(n), padded(k))
