"""`prepare_params`: validate, quantise, pad, convert. Paid once, expert by expert."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dgmoe_jax import backends, checks
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.quantize import quantize, stored
from dgmoe_jax.recipes import BESIDE, FP8_128X128, RECIPES, Format, padded, run_on
from dgmoe_jax.types import ExpertWeights, MoEParams, Scaled
from dgmoe_jax.weights import paths

_REQUIRED = ("gate_weight", "w13", "w2")
_OPTIONAL = ("gate_bias", "w13_scale", "w2_scale", "hash_table")
_SHARED = ("shared_w13", "shared_w2", "shared_w13_scale", "shared_w2_scale", "shared_gate_weight")
_FLOATS = ("bfloat16", "float16", "float32")


Progress = Callable[[str, int, int], None]


def prepare_params(
    raw: Mapping[str, Any],
    cfg: MoEConfig,
    *,
    arch: str | None = None,
    progress: Progress | None = None,
) -> MoEParams:
    """Checkpoint arrays -> `MoEParams` for `moe_layer`.

    Args:
      raw: `gate_weight` [E, H]; optional `gate_bias` [E]; `w13` [E, 2I, H], gate rows then up
        rows; `w2` [E, H, I]; with `num_shared_experts` S > 0 also `shared_w13` [2SI, H], all gate
        rows then all up rows, `shared_w2` [H, SI], and optional `shared_gate_weight` [1, H], whose
        sigmoid weighs the shared experts' sum (Qwen2-MoE). Weights in bf16, f16 or f32 are
        quantised to `cfg.recipe` here. Weights that are encoded already come with `*_scale`:

        - "fp8_block": float8_e4m3fn, and f32 (or UE8M0) per 128 x 128 block: `w13_scale`
          [E, 2 * ceil(I / 128), ceil(H / 128)] (gate blocks, then up blocks), `w2_scale`
          [E, ceil(H / 128), ceil(I / 128)]; or per tensor: `w13_scale` [E], or [E, 2] for gate and
          up apart, and `w2_scale` [E], in f32;
        - "mxfp8": float8_e4m3fn, and UE8M0 per row and 32 columns: `w13_scale`
          [E, 2I, ceil(H / 32)], `w2_scale` [E, H, ceil(I / 32)];
        - "mxfp4": uint8 or int8, two E2M1 a byte, the low nibble first along K: `w13`
          [E, 2I, H / 2], `w2` [E, H, I / 2], and scales as of "mxfp8".

        UE8M0 scales are float8_e8m0fnu, uint8 (the exponent) or f32 powers of two. `shared_*` are
        the same without E, and may be FP8 in blocks beside experts in FP4 (DeepSeek-V4). Fused
        shared experts become experts E, E + 1, ... of the same block of weights. Hash selection
        also needs `hash_table` [vocab, k] int32 or int64 of experts' ids.
      arch: the architecture to lay out for: "cpu", "sm90", "sm100" (`recipes.RUNS_ON` says how each
        runs a recipe, and `recipes.BY_BACKEND` where `cfg.backend` decides). None is the default
        device's. With a GPU backend named in `cfg`, a CPU stands for sm90.
      progress: called with a weight's name, experts done and experts in all, after each expert that
        had to be quantised, converted or padded.

    Returns:
      Params with H and I padded to multiples of 128 by zeros. One expert at a time is quantised or
      converted; numpy arrays (memory-mapped ones, too) go to the device one expert at a time then.

    Warns:
      UserWarning: weights that were encoded already lost by being converted; how much, relative.

    Raises:
      ValueError, TypeError: a missing or unknown name, a shape or dtype that does not fit `cfg`,
        a UE8M0 scale that is no power of two.
      NotImplementedError: shared experts that cannot be fused with the others.
    """
    arch = backends.current_arch() if arch is None else arch
    checks.arch(arch)
    _check_names(raw, cfg)

    def weights(raw, prefix, lead, hidden, inner, recipe=cfg.recipe):
        source = RECIPES[recipe].weights
        to = run_on(recipe, arch, cfg.backend).operands.weights
        return _weights(raw, prefix, lead, hidden, inner, source=source, to=to, progress=progress)

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
    experts = weights(raw, "", (num_experts,), hidden, inner)
    shared, count = None, cfg.num_shared_experts
    recipe = _recipe_of_shared(raw, cfg)
    if cfg.router.fused_shared_experts:
        apart = _one_by_one(raw, cfg, RECIPES[recipe].weights)
        fused = weights(apart, "shared_", (count,), hidden, inner, recipe)
        if fused.w13.format != experts.w13.format:
            raise NotImplementedError(
                f"shared_w13: {fused.w13.format.name} beside experts in {experts.w13.format.name};"
                " fused_shared_experts=0 runs, and where those are FP4 tiles backend='deep_gemm'"
            )
        experts = jax.tree.map(lambda *pair: jnp.concatenate(pair), experts, fused)
    elif count:
        shared = weights(raw, "shared_", (), hidden, count * inner, recipe)
    shared_gate = raw.get("shared_gate_weight")
    if shared_gate is not None:
        shared_gate = jnp.asarray(shared_gate)
        checks.shape("shared_gate_weight", shared_gate, (1, hidden))
        checks.dtype("shared_gate_weight", shared_gate, _FLOATS)
    table = _hash_table(raw, cfg)
    return MoEParams(gate_weight, gate_bias, experts, shared, table, shared_gate)


def _recipe_of_shared(raw: Mapping[str, Any], cfg: MoEConfig) -> str:
    other = BESIDE.get(cfg.recipe)
    fits = other and cfg.num_shared_experts
    if fits and _is_encoded(_array(raw["shared_w13"]), RECIPES[other].weights):
        return other
    return cfg.recipe


def _one_by_one(raw: Mapping[str, Any], cfg: MoEConfig, fmt: Format) -> dict[str, Array]:
    """The shared experts' block, cut: shared_w13 [S, 2I, H], shared_w2 [S, H, I], and scales."""
    count, hidden, inner = cfg.num_shared_experts, cfg.hidden_size, cfg.intermediate_size
    given = {name: _array(raw[name]) for name in _SHARED[:4] if raw.get(name) is not None}
    for name, n, k in (
        ("shared_w13", 2 * count * inner, hidden),
        ("shared_w2", hidden, count * inner),
    ):
        packed = fmt.packed if _is_encoded(given[name], fmt) else 1
        checks.shape(name, given[name], (n, k // packed))
    by_block = [name for name, x in given.items() if name.endswith("_scale") and x.ndim == 2]
    if by_block and count > 1 and inner % fmt.group[1]:
        raise NotImplementedError(
            f"{by_block[0]}: groups of {fmt.group[1]} span two fused shared experts of {inner};"
            " fused_shared_experts=0 runs"
        )
    for name, x in given.items():
        if x.ndim < 2:  # of the whole tensor, or of gate and up
            given[name] = jnp.broadcast_to(x, (count, *x.shape))
        elif name.startswith("shared_w13"):
            x = x.reshape(2, count, -1, x.shape[-1]).swapaxes(0, 1)
            given[name] = x.reshape(count, -1, x.shape[-1])
        else:
            given[name] = x.reshape(x.shape[0], count, -1).swapaxes(0, 1)
    return given


def _array(x: Any) -> Array | np.ndarray:
    """Numpy arrays stay where they are, unless JAX would change their dtype."""
    return x if isinstance(x, np.ndarray) and x.dtype.itemsize < 8 else jnp.asarray(x)


def _is_encoded(weight: Array | np.ndarray, fmt: Format) -> bool:
    """Whether it is stored in `fmt` already; FP4's bytes may be signed."""
    dtypes = (fmt.dtype, "int8") if fmt.packed > 1 else (fmt.dtype,)
    return fmt.group is not None and jnp.dtype(weight.dtype).name in dtypes


def _hash_table(raw: Mapping[str, Any], cfg: MoEConfig) -> Array | None:
    if cfg.router.selection != "hash":
        return None
    table = raw["hash_table"]
    if not isinstance(table, Array):  # JAX would wrap int64 to int32 before its range is checked
        table = np.asarray(table)
    checks.shape("hash_table", table, (None, cfg.router.top_k))
    checks.dtype("hash_table", table, ("int32", "int64"))
    if table.size and not isinstance(table, jax.core.Tracer):
        low, high = int(table.min()), int(table.max())
        if low < 0 or high >= cfg.num_experts:
            raise ValueError(
                f"hash_table: ids {low}..{high}, must be in [0, {cfg.num_experts}), num_experts"
            )
    return jnp.asarray(table, jnp.int32)


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
    raw: Mapping[str, Any],
    prefix: str,
    lead: tuple[int, ...],
    hidden: int,
    inner: int,
    *,
    source: Format,
    to: Format,
    progress: Progress | None,
) -> ExpertWeights:
    """`lead` is (E,) for experts and () for a dense block, which becomes the only expert of one."""

    def operand(name: str, size: tuple[int, int, int]) -> Scaled:
        weight, scales = _given(raw, name, lead, size, source)
        return _prepared(name, weight, scales, size, source, to, progress)

    # Gate and up are padded apart, so that each half still starts on a scale block.
    return ExpertWeights(
        operand(f"{prefix}w13", (2, inner, hidden)), operand(f"{prefix}w2", (1, hidden, inner))
    )


def _given(
    raw: Mapping[str, Any],
    name: str,
    lead: tuple[int, ...],
    size: tuple[int, int, int],
    fmt: Format,
) -> tuple[Array | np.ndarray, Array | None]:
    """Values [E, parts * n, k] and their f32 scales, one a group; None: yet to be quantised."""
    parts, n, k = size
    weight, scale = _array(raw[name]), raw.get(f"{name}_scale")
    encoded = _is_encoded(weight, fmt)
    if not encoded:
        checks.dtype(name, weight, (*_FLOATS, fmt.dtype) if fmt.group else _FLOATS)
    if encoded and k % fmt.packed:
        raise ValueError(f"{name}: {k} values a row, must be even where a byte holds two")
    width = k // fmt.packed if encoded else k
    checks.shape(name, weight, (*lead, parts * n, width))
    if encoded and scale is None:
        raise ValueError(f"{name}: dtype {weight.dtype} without {name}_scale")
    if scale is not None and not encoded:
        takes = f"{fmt.dtype} weights" if fmt.group else "no recipe but a quantised one"
        raise ValueError(
            f"{name}_scale: given with {name} of dtype {weight.dtype}; goes with {takes}"
        )
    weight = weight.reshape(-1, parts * n, width)
    if not encoded:
        return weight, None
    name, scale = f"{name}_scale", jnp.asarray(scale)
    rows, columns = fmt.scales_shape(n, k)
    if fmt == FP8_128X128 and scale.ndim < len(lead) + 2:
        apart = (parts,) if scale.ndim > len(lead) and parts > 1 else ()
        checks.shape(name, scale, (*lead, *apart))
        checks.dtype(name, scale, ("float32",))
        scale = paths.per_tensor_scales(scale, len(lead), parts, n, k)
    checks.shape(name, scale, (*lead, parts * rows, columns))
    checks.dtype(name, scale, ("float32", "float8_e8m0fnu", "uint8"))
    if fmt.ue8m0 or scale.dtype != jnp.float32:
        scale = paths.ue8m0_to_f32(name, scale)
    return weight, scale.reshape(-1, parts * rows, columns)


def _prepared(
    name: str,
    weight: Array | np.ndarray,
    scales: Array | None,
    size: tuple[int, int, int],
    source: Format,
    to: Format,
    progress: Progress | None,
) -> Scaled:
    """What `_given` gave, quantised to `source` if it is not yet, padded, and taken to `to`."""
    parts, n, k = size
    whole = (n, k) == (padded(n), padded(k))
    ready = scales is not None or weight.dtype == source.dtype
    if ready and whole and replace(to, packed_scales=False) == source:
        values = jnp.asarray(weight)
    else:
        stacks = (weight,) if scales is None else (weight, scales)
        values, scales, errors = _by_expert(name, stacks, progress, size=size, source=source, to=to)
        if len(stacks) > 1 and not isinstance(errors, jax.core.Tracer) and errors.any():
            warnings.warn(
                f"{name}: converting {source.name} to {to.name} ({'UE8M0' if to.ue8m0 else 'f32'}"
                f" scales) has cost {int((errors > 0).sum())} of {len(errors)} experts a relative"
                f" error of up to {float(errors.max()):.2g}",
                stacklevel=5,
            )
    if values.dtype != to.dtype:
        values = lax.bitcast_convert_type(values, to.dtype)
    return Scaled(values, None if scales is None else stored(scales, to, parts * padded(n)), to)


def _by_expert(name: str, stacks: tuple, progress: Progress | None, **how) -> tuple:
    """`_one_expert` of each expert's arrays, stacked, so that a copy in f32 is one expert's.

    Values may come as bits: XLA on a CPU converts a whole stack of float8 to another float to read
    or write one of them.
    """

    def as_bits(arrays):
        values, *rest = _one_expert(*arrays, **how)
        return _bits(values), *rest

    if any(isinstance(x, jax.core.Tracer) for x in stacks):
        return lax.map(as_bits, stacks)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        stacks = tuple(map(np.asarray, stacks))  # not a copy
    count = len(stacks[0])
    one = jax.eval_shape(
        as_bits if on_cpu else lambda arrays: _one_expert(*arrays, **how), [x[0] for x in stacks]
    )
    out = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), one)
    for e in range(count):
        out = jax.block_until_ready(_store(out, e, *(x[e] for x in stacks), **how))
        if progress is not None:
            progress(name, e + 1, count)
    return out


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("size", "source", "to"))
def _store(out: tuple, e: int, *arrays: Array, **how) -> tuple:
    values, *rest = _one_expert(*arrays, **how)
    new = lax.bitcast_convert_type(values, out[0].dtype), *rest
    return jax.tree.map(lambda stack, x: stack.at[e].set(x), out, new)


def _one_expert(
    weight: Array,
    scales: Array | None = None,
    *,
    size: tuple[int, int, int],
    source: Format,
    to: Format,
) -> tuple[Array, Array | None, Array]:
    """Values and f32 scales in `to`, and the relative error of getting there from `source`."""
    parts, n, k = size
    n, k = padded(n), padded(k)
    if scales is None:
        # What the GEMM reads in one step, unless the recipe has coarser values.
        first = replace(to, packed_scales=False) if to.dtype == source.dtype else source
        scaled = quantize(_pad(weight, parts, n, k), first)
        values, scales, source = scaled.values, scaled.scales, first
    else:
        values = _pad(lax.bitcast_convert_type(weight, source.dtype), parts, n, k // source.packed)
        rows, columns = source.scales_shape(n, k)
        scales = _pad(scales, parts, rows, columns)
    return paths.convert(values, scales, source, to)


def _bits(values: Array) -> Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[values.dtype.itemsize]
    return lax.bitcast_convert_type(values, bits)


def _pad(x: Array, parts: int, rows: int, columns: int) -> Array:
    """[parts * n, k] -> [parts * rows, columns], zeros in what is new."""
    x = x.reshape(parts, -1, x.shape[-1])
    x = jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, columns - x.shape[2])))
    return x.reshape(parts * rows, columns)
