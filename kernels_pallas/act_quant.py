"""Gated activations of the first expert GEMM's output, rounded to bf16 or quantised to FP8."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import BF16, F32, I32, Registers, launch, vector
from .quant import (
    GROUP,
    block_rows,
    check_group,
    quantize_tile,
    quantized_type,
    row_layout,
    tile_rows,
)

LOG2E = math.log2(math.e)
# Rows of a block; groups of a row that it does in turn, so that a block of padding costs little;
# and the blocks that there should be before it does more than one.
TILE, GROUPS, BLOCKS = 16, 8, 1056


def act(
    gateup: Array,
    m_indices: Array,
    *,
    activation: str,
    params: tuple[float | None, ...],
    interpret: bool = False,
) -> Array:
    """gateup [M, 2I] bf16 (gate columns, then up), m_indices [M] int32 -> [M, I] bf16.

    `activation` and `params`: "silu" (limit or None), "oai_swiglu" (alpha, limit), "situ" (beta,
    linear_beta). f32 inside, one rounding. Rows of blocks in which every m_indices is -1 are not
    written. Raises ValueError for shapes or an activation that do not fit.
    """

    def store(product, layout, rows, g, regs, out_ref):
        out_ref[rows, g, :] = product.astype(BF16)

    m, width = _check(gateup, m_indices)
    out_type = (jax.ShapeDtypeStruct((m, width // GROUP, GROUP), BF16),)
    out = _gated(store, gateup, m_indices, activation, params, out_type, interpret)
    return out[0].reshape(m, width)


def act_quant(
    gateup: Array,
    m_indices: Array,
    *,
    activation: str,
    params: tuple[float | None, ...],
    group: int = GROUP,
    ue8m0: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`act`, then `quant`, in one pass: values [M, I] float8_e4m3fn, scales [I / 128, M4] f32.

    The product stays in f32 until it is quantised. Rows of blocks in which every m_indices is -1,
    and columns M..M4 of the scales, are not written.
    """
    check_group(group)

    def store(product, layout, rows, g, regs, values_ref, scales_ref):
        values_ref[rows, g, :], scales_ref[g, rows] = quantize_tile(product, layout, ue8m0, regs)

    m, width = _check(gateup, m_indices)
    values_type, scales_type = quantized_type(m, width)
    out_type = (values_type.update(shape=(m, width // GROUP, GROUP)), scales_type)
    values, scales = _gated(store, gateup, m_indices, activation, params, out_type, interpret)
    return values.reshape(m, width), scales


def _check(gateup: Array, m_indices: Array) -> tuple[int, int]:
    if gateup.ndim != 2 or gateup.dtype != BF16 or gateup.shape[1] % (2 * GROUP):
        raise ValueError(
            f"gateup is {gateup.dtype}{list(gateup.shape)}; it must be bf16 [M, 2I], I % 128 == 0"
        )
    if m_indices.shape != gateup.shape[:1] or m_indices.dtype != I32:
        raise ValueError(
            f"m_indices is {m_indices.dtype}{list(m_indices.shape)}; it must be "
            f"int32 [{gateup.shape[0]}], one a row of gateup"
        )
    return gateup.shape[0], gateup.shape[1] // 2


def _gated(
    store: Callable,
    gateup: Array,
    m_indices: Array,
    activation: str,
    params: tuple[float | None, ...],
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    interpret: bool,
) -> tuple[Array, ...]:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; known: {', '.join(ACTIVATIONS)}")
    m, groups = gateup.shape[0], gateup.shape[1] // (2 * GROUP)
    if m == 0:
        return tuple(jnp.zeros(t.shape, t.dtype) for t in out_type)
    regs = Registers(interpret)
    tile = tile_rows(m, TILE)
    blocks = -(-m // tile)
    each = max(1, min(GROUPS, groups, blocks * groups // BLOCKS))
    layout = row_layout(tile)

    def kernel(gateup_ref, m_indices_ref, *out_refs):
        rows = block_rows(lax.axis_index("m"), tile, m)
        if tile == 1:
            live = m_indices_ref[rows] >= 0
        else:
            live = jnp.max(regs.load(m_indices_ref.at[rows], vector(tile, warps=1))) >= 0

        def load(g):
            return [regs.load(gateup_ref.at[rows, half, g, :], layout) for half in (0, 1)]

        def compute(g, loaded):
            gate, up = (x.astype(F32) for x in loaded)
            store(
                ACTIVATIONS[activation](gate, up, *params, regs), layout, rows, g, regs, *out_refs
            )

        @pl.when(live)
        def _():
            first = lax.axis_index("g") * each
            count = each if groups % each == 0 else jnp.minimum(each, groups - first)

            def step(i, loaded):  # Loads are issued before the computation that precedes them.
                ahead = load(first + i + 1)
                compute(first + i, loaded)
                return ahead

            last = lax.fori_loop(0, count - 1, step, load(first))
            compute(first + count - 1, last)

    # The hardware's exp2 is the one that the library calls, less its care for subnormals, which
    # cannot matter beside 1; the hardware's tanh has 11 bits, which would.
    return launch(
        kernel,
        out_type,
        grid={"m": blocks, "g": -(-groups // each)},
        interpret=interpret,
        barriers=False,
        approx_math=activation != "situ",
    )(gateup.reshape(m, 2, groups, GROUP), m_indices)


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
