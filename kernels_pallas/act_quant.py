"""Gated activations of the first expert GEMM's output, rounded to bf16 or quantised to FP8."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import BF16, F32, I32, Registers, launch
from .quant import (
    GROUP,
    check_group,
    quantize_tile,
    quantized_type,
    row_layout,
    tile_rows,
)

LOG2E = math.log2(math.e)
# Rows of a step, and the blocks that there should be before one takes more than one step.
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

    def store(product, layout, rows, g, regs, out_ref):
        out_ref[rows, g, :] = product.astype(BF16)

    m, groups = _check(gateup, tiles, tile, alignment, activation)
    out_types = (jax.ShapeDtypeStruct((m, groups, GROUP), BF16),)
    rule = tile, alignment, activation, params
    out = _gated(store, gateup, tiles, *rule, out_types, interpret)
    return out[0].reshape(m, groups * GROUP)


def act_quant(
    gateup: Array,
    tiles: Array,
    *,
    tile: int,
    alignment: int,
    slabs: int = 1,
    activation: str,
    params: tuple[float | None, ...],
    group: int = GROUP,
    ue8m0: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`act`, then `quant`, in one pass: values [M, I] float8_e4m3fn, scales [slabs * G, S] f32.

    G = I / 128, S = M / slabs up to 4s: row r's scales lie in column r % (M / slabs) of slab
    r // (M / slabs). The product stays in f32 until it is quantised.
    """
    check_group(group)
    m, groups = _check(gateup, tiles, tile, alignment, activation)
    if m % slabs or (slabs > 1 and m // slabs % alignment):
        raise ValueError(
            f"M={m}, slabs={slabs}; a slab must hold a multiple of alignment={alignment} rows"
        )
    capacity = m // slabs

    def store(product, layout, rows, g, regs, values_ref, scales_ref):
        values_ref[rows, g, :], scales = quantize_tile(product, layout, ue8m0, regs)
        if slabs == 1:
            scales_ref[0, g, rows] = scales
        else:
            first = lax.rem(rows.start, capacity)
            scales_ref[lax.div(rows.start, capacity), g, pl.ds(first, rows.size)] = scales

    values_type, scales_type = quantized_type(m, groups * GROUP, slabs)
    out_types = (
        values_type.update(shape=(m, groups, GROUP)),
        scales_type.update(shape=(slabs, groups, scales_type.shape[1])),
    )
    rule = tile, alignment, activation, params
    values, scales = _gated(store, gateup, tiles, *rule, out_types, interpret)
    return values.reshape(m, groups * GROUP), scales.reshape(slabs * groups, -1)


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
    return gateup.shape[0], gateup.shape[1] // (2 * GROUP)


def _gated(
    store: Callable,
    gateup: Array,
    tiles: Array,
    tile: int,
    alignment: int,
    activation: str,
    params: tuple[float | None, ...],
    out_types: tuple[jax.ShapeDtypeStruct, ...],
    interpret: bool,
) -> tuple[Array, ...]:
    (m, groups, _), count = out_types[0].shape, tiles.shape[1]
    if m == 0 or count == 0:
        return tuple(jnp.zeros(t.shape, t.dtype) for t in out_types)
    regs = Registers(interpret)
    # A step divides the alignment: it touches no row that its tile does not own.
    size = tile_rows(m, ROWS if alignment % ROWS == 0 else 8)
    steps = pl.cdiv(min(tile, m), size)
    each = min(steps, max(1, count * steps * groups // BLOCKS))
    parts = pl.cdiv(steps, each)
    layout = row_layout(size)

    def gate_up(gateup_ref, tiles_ref, *out_refs):
        block = lax.axis_index("b")
        part, g = lax.div(block, groups), lax.rem(block, groups)
        index, first = lax.div(part, parts), lax.rem(part, parts) * each
        row, live = tiles_ref[1, index], tiles_ref[2, index]
        mine = jnp.minimum(lax.div(live + (size - 1), size) - first, each)

        def rows(i):  # Where M is no multiple of a step, the last one starts early.
            start = jnp.minimum(row + (first + i) * size, m - size)
            return start if size == 1 else pl.ds(start, size)

        def load(i):
            return [regs.load(gateup_ref.at[rows(i), half, g, :], layout) for half in (0, 1)]

        def compute(i, loaded):
            gate, up = (x.astype(F32) for x in loaded)
            product = ACTIVATIONS[activation](gate, up, *params, regs)
            store(product, layout, rows(i), g, regs, *out_refs)

        @pl.when(mine > 0)
        def _():
            def step(i, loaded):  # Loads are issued before the computation that precedes them.
                ahead = load(i + 1)
                compute(i, loaded)
                return ahead

            compute(mine - 1, lax.fori_loop(0, mine - 1, step, load(0)))

    # The hardware's exp2 is the one that the library calls, less its care for subnormals, which
    # cannot matter beside 1; the hardware's tanh has 11 bits, which would.
    return launch(
        gate_up,
        out_types,
        grid={"b": count * parts * groups},  # One dimension: others end at 65535.
        interpret=interpret,
        barriers=False,
        approx_math=activation != "situ",
    )(gateup.reshape(m, 2, groups, GROUP), tiles)


def _clamp_top(x: Array, limit: float) -> Array:
    # Selects rather than minima: they keep NaN wherever this runs.
    return jnp.where(x > limit, limit, x)


def _clamp(x: Array, limit: float) -> Array:
    return jnp.where(x < -limit, -limit, _clamp_top(x, limit))


def _sigmoid(x: Array) -> Array:
    # exp2: its argument is rounded once more than that of exp, at a third of the instructions.
    return 1.0 / (1.0 + jnp.exp2(x * -LOG2E))


def _silu(gate: Array, up: Array, limit: float | None, regs: Registers) -> Array:
    if limit is not None:
        gate, up = _clamp_top(gate, limit), _clamp(up, limit)
    return gate * _sigmoid(gate) * up


def _oai_swiglu(gate: Array, up: Array, alpha: float, limit: float, regs: Registers) -> Array:
    gate, up = _clamp_top(gate, limit), _clamp(up, limit)
    return gate * _sigmoid(gate * alpha) * (up + 1.0)


def _situ(gate: Array, up: Array, beta: float, linear_beta: float, regs: Registers) -> Array:
    gated = beta * jnp.tanh(regs.divide(gate, beta)) * _sigmoid(gate)
    return gated * (linear_beta * jnp.tanh(regs.divide(up, linear_beta)))


ACTIVATIONS = {"silu": _silu, "oai_swiglu": _oai_swiglu, "situ": _situ}
