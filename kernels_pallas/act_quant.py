"""Gated activations of the first expert GEMM's output, rounded to bf16 or quantised to FP8."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import BF16, F32, I32, Registers, as_bf16, launch, own_index
from .quant import (
    GROUP,
    Rule,
    Units,
    quantize_tile,
    quantized_type,
    rule_of,
    tile_rows,
    unit_layout,
)

Inverse = Callable[[Array], Array]  # 1 / x of positive f32

LOG2E = math.log2(math.e)
# Rows of a step of 128 columns, and the blocks that there should be before one takes more than one.
ROWS, BLOCKS = 16, 1056


def act(
    gateup: Array,
    tiles: Array,
    *,
    tile: int,
    alignment: int,
    activation: str,
    params: tuple[float | None, ...],
    interpret: bool = False,
) -> Array:
    """gateup [M, 2I] bf16 (gate columns, then up), tiles [3, N] int32 -> [M, I] bf16.

    `tiles` (permute_index) says which rows are live; from there to the next multiple of
    `alignment` rows may be written too, others are not. `activation` and `params`: "silu" (limit
    or None), "oai_swiglu" (alpha, limit), "situ" (beta, linear_beta). f32 inside, one rounding.
    Raises ValueError for shapes or an activation that do not fit.
    """

    def store(product, layout, rows, unit, groups, out_ref):
        out_ref[rows, units.at(unit, groups)] = product.astype(BF16)

    m, width = _check(gateup, tiles, tile, alignment, activation)
    units = Units(width, Rule())
    out_types = (jax.ShapeDtypeStruct((m, *units.view), BF16),)
    where = tile, alignment
    out = _gated(store, gateup, tiles, units, *where, activation, params, out_types, interpret)
    return out[0].reshape(m, width)


def act_quant(
    gateup: Array,
    tiles: Array,
    *,
    tile: int,
    alignment: int,
    slabs: int = 1,
    activation: str,
    params: tuple[float | None, ...],
    keep_fp32: bool = True,
    group: int = GROUP,
    ue8m0: bool = False,
    packed: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`act`, then `quant`, in one pass: values [M, I] float8_e4m3fn, scales f32 or packed int32.

    `group`, `ue8m0`, `packed` and the layout of the scales, in `slabs`: `quant.Rule`. The product
    stays in f32 until it is quantised; with `keep_fp32` False it is rounded to bf16 first, which
    gives the bits of `act` and `quant` one after the other.
    """
    rule = rule_of(group, ue8m0, packed)
    m, width = _check(gateup, tiles, tile, alignment, activation)
    if m % slabs or (slabs > 1 and m // slabs % alignment):
        raise ValueError(
            f"M={m}, slabs={slabs}; a slab must hold a multiple of alignment={alignment} rows"
        )
    capacity, regs, units = m // slabs, Registers(interpret), Units(width, rule)

    def store(product, layout, rows, unit, groups, values_ref, scales_ref):
        if not keep_fp32:
            # jax 0.11.2's barrier swaps the registers of bf16 that come more than two at a time;
            # nothing but XLA, when it interprets, drops the rounding without one.
            product = as_bf16(product) if interpret else product.astype(BF16).astype(F32)
        at = units.at(unit, groups)
        values_ref[rows, at], scales = quantize_tile(product, layout, rule, regs, groups)
        slab = 0
        if slabs > 1:
            slab = lax.div(rows.start, capacity)
            rows = pl.ds(lax.rem(rows.start, capacity), rows.size)
        units.store_scales(scales_ref, slab, unit, rows, scales, regs)

    out_types, where = units.out_types(m, slabs), (tile, alignment)
    out = _gated(store, gateup, tiles, units, *where, activation, params, out_types, interpret)
    return tuple(
        x.reshape(t.shape) for x, t in zip(out, quantized_type(m, width, rule, slabs), strict=True)
    )


def _check(
    gateup: Array, tiles: Array, tile: int, alignment: int, activation: str
) -> tuple[int, int]:
    if gateup.ndim != 2 or gateup.dtype != BF16 or gateup.shape[1] % (2 * GROUP):
        raise ValueError(
            f"gateup is {gateup.dtype}{list(gateup.shape)}; it must be bf16 [M, 2I], I % 128 == 0"
        )
    if tiles.ndim != 2 or tiles.shape[0] != 3 or tiles.dtype != I32:
        raise ValueError(f"tiles is {tiles.dtype}{list(tiles.shape)}; it must be int32 [3, N]")
    if alignment < 8 or alignment % 8 or tile < 8 or tile % alignment:
        raise ValueError(
            f"alignment={alignment}, tile={tile}; they must be multiples of 8, tile of alignment"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; known: {', '.join(ACTIVATIONS)}")
    return gateup.shape[0], gateup.shape[1] // 2


def _gated(
    store: Callable,
    gateup: Array,
    tiles: Array,
    units: Units,
    tile: int,
    alignment: int,
    activation: str,
    params: tuple[float | None, ...],
    out_types: tuple[jax.ShapeDtypeStruct, ...],
    interpret: bool,
) -> tuple[Array, ...]:
    m, count = gateup.shape[0], tiles.shape[1]
    if m == 0 or count == 0:
        return tuple(jnp.zeros(t.shape, t.dtype) for t in out_types)
    regs = Registers(interpret)
    # A step divides the alignment: it touches no row that its tile does not own.
    most = max(8, ROWS // units.wide)
    size = tile_rows(m, most if alignment % most == 0 else 8)
    steps = pl.cdiv(min(tile, m), size)
    each = min(steps, max(1, count * steps * units.count // BLOCKS))
    parts = pl.cdiv(steps, each)

    def gate_up(gateup_ref, tiles_ref, *out_refs):
        block = own_index("b")
        part, unit = lax.div(block, units.count), lax.rem(block, units.count)
        index, first = lax.div(part, parts), lax.rem(part, parts) * each
        row, live = tiles_ref[1, index], tiles_ref[2, index]
        mine = jnp.minimum(lax.div(live + (size - 1), size) - first, each)

        def rows(i):  # Where M is no multiple of a step, the last one starts early.
            start = jnp.minimum(row + (first + i) * size, m - size)
            return start if size == 1 else pl.ds(start, size)

        def walk(groups):
            at, layout = units.at(unit, groups), unit_layout(size, groups, units.rule.group)

            def load(i):
                return [regs.load(gateup_ref.at[rows(i), half, at], layout) for half in (0, 1)]

            def compute(i, loaded):
                gate, up = (x.astype(F32) for x in loaded)
                inverse = regs.inverse(layout)
                product = ACTIVATIONS[activation](gate, up, *params, inverse=inverse)
                store(product, layout, rows(i), unit, groups, *out_refs)

            def step(i, loaded):  # Loads are issued before the computation that precedes them.
                ahead = load(i + 1)
                compute(i, loaded)
                return ahead

            compute(mine - 1, lax.fori_loop(0, mine - 1, step, load(0)))

        pl.when(mine > 0)(lambda: units.each(unit, walk))

    return launch(
        gate_up,
        out_types,
        grid={"b": count * parts * units.count},  # One dimension: others end at 65535.
        interpret=interpret,
        barriers=False,
        # The hardware's exp2 is the one that the library calls, less its care for subnormals, which
        # cannot matter beside 1.
        approx_math=True,
    )(gateup.reshape(m, 2, *units.view), tiles)


def _clamp_top(x: Array, limit: float) -> Array:
    # Selects rather than minima: they keep NaN wherever this runs.
    return jnp.where(x > limit, limit, x)


def _clamp(x: Array, limit: float) -> Array:
    return jnp.where(x < -limit, -limit, _clamp_top(x, limit))


def _sigmoid(x: Array, inverse: Inverse) -> Array:
    # exp2: its argument is rounded once more than that of exp, at a third of the instructions.
    return inverse(1.0 + jnp.exp2(x * -LOG2E))


def _silu(gate: Array, up: Array, limit: float | None, *, inverse: Inverse) -> Array:
    if limit is not None:
        gate, up = _clamp_top(gate, limit), _clamp(up, limit)
    return gate * _sigmoid(gate, inverse) * up


def _oai_swiglu(gate: Array, up: Array, alpha: float, limit: float, *, inverse: Inverse) -> Array:
    gate, up = _clamp_top(gate, limit), _clamp(up, limit)
    return gate * _sigmoid(gate * alpha, inverse) * (up + 1.0)


def _situ(gate: Array, up: Array, beta: float, linear_beta: float, *, inverse: Inverse) -> Array:
    """Within some 2^-10 on a GPU: each tanh is the hardware's, within 2^-11 (PTX ISA,
    tanh.approx.f32), as in SGLang's kernels, which are compiled with --use_fast_math."""
    return _soft_clip(gate, beta) * _sigmoid(gate, inverse) * _soft_clip(up, linear_beta)


def _soft_clip(x: Array, by: float) -> Array:
    """by * tanh(x / by)."""
    clipped = by * jnp.tanh(x * (1 / by))
    if by < 2.0**8:
        return clipped
    # x / by may be too small for an f32, where x is the result.
    return jnp.where(jnp.abs(x) < by * 2.0**-13, x, clipped)


ACTIVATIONS = {"silu": _silu, "oai_swiglu": _oai_swiglu, "situ": _situ}
