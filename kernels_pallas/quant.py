"""Per-token-group FP8 quantisation: bf16 rows to e4m3 values and f32 scales, MN-major."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import BF16, F32, FP8, I32, Registers, launch, spread_rows, vector

GROUP = 128
TILE = 32  # rows of a block, each a group wide
E4M3_MAX = 448.0
FLOOR_BITS = int(np.float32(1e-10).view(np.int32))


def quant(
    x: Array, *, group: int = GROUP, ue8m0: bool = False, interpret: bool = False
) -> tuple[Array, Array]:
    """x [M, K] bf16 -> values [M, K] float8_e4m3fn, scales [K / 128, M4] f32, M4 = M up to 4s.

    Per row and group of 128: scale = max(amax, 1e-10) / 448, with `ue8m0` rounded up to a power of
    two (exponent 1..254); value = x / scale, IEEE division, clamped, rounded to nearest even. Inf
    or NaN in a group leaves NaN in its values. Columns M..M4 of the scales are not written.

    Raises ValueError for K that is no multiple of 128, NotImplementedError for another group.
    """
    check_group(group)
    if x.ndim != 2 or x.dtype != BF16 or x.shape[1] % GROUP:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be bf16 [M, K], K % 128 == 0")
    m, k = x.shape
    out_type = quantized_type(m, k)
    if m == 0:
        return tuple(jnp.zeros(t.shape, t.dtype) for t in out_type)
    regs = Registers(interpret)
    tile = tile_rows(m, TILE)
    layout = row_layout(tile)

    def quantise(x_ref, values_ref, scales_ref):
        rows, g = block_rows(lax.axis_index("m"), tile, m), lax.axis_index("g")
        x = regs.load(x_ref.at[rows, g, :], layout).astype(F32)
        values_ref[rows, g, :], scales_ref[g, rows] = quantize_tile(x, layout, ue8m0, regs)

    values, scales = launch(
        quantise,
        (jax.ShapeDtypeStruct((m, k // GROUP, GROUP), FP8), out_type[1]),
        grid={"m": -(-m // tile), "g": k // GROUP},
        interpret=interpret,
        barriers=False,
    )(x.reshape(m, k // GROUP, GROUP))
    return values.reshape(m, k), scales


def check_group(group: int) -> None:
    if group != GROUP:
        raise NotImplementedError(f"group={group}: the Pallas kernels quantise groups of 128")


def quantized_type(
    m: int, k: int, slabs: int = 1
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """values [M, K], scales [slabs * K / 128, S], S = M / slabs rounded up to 4."""
    scales = jax.ShapeDtypeStruct((slabs * (k // GROUP), -(-(m // slabs) // 4) * 4), F32)
    return jax.ShapeDtypeStruct((m, k), FP8), scales


def tile_rows(m: int, most: int) -> int:
    """Rows of a block: 1, or steps of the 8 rows that a load of the row layout covers."""
    return most if m >= most else 8 if m >= 8 else 1


def block_rows(block: Array, tile: int, m: int) -> Array | pl.Slice:
    """Index of a block's rows. The last block overlaps its neighbour rather than pass the end: both
    write equal bytes. A tile of one row is indexed without that dimension."""
    return block if tile == 1 else pl.ds(jnp.minimum(block * tile, m - tile), tile)


def row_layout(tile: int) -> plgpu.ParameterizedLayout:
    """[tile, 128] with 16 bytes of bf16 a thread; one row alone, [128], is every warp's."""
    return spread_rows(tile, GROUP, 8) if tile > 1 else vector(GROUP, 4, warps=1)


def quantize_tile(x: Array, layout, ue8m0: bool, regs: Registers) -> tuple[Array, Array]:
    """x [rows, 128] f32 -> values [rows, 128] FP8, scales [rows]; one row: [128] -> [128], scalar.

    The largest magnitude is found on the bits, where NaN is above Inf and never dropped, as a float
    maximum may do (PTX `max`, XLA on a CPU). No clamp: |x / scale| is 448 and an ulp at most, which
    rounds to 448, and Inf / Inf is the NaN that has to show.
    """
    bits = lax.bitcast_convert_type(x, I32) & 0x7FFFFFFF
    amax = lax.bitcast_convert_type(jnp.maximum(jnp.max(bits, axis=-1), FLOOR_BITS), F32)
    scales = regs.divide(amax, E4M3_MAX)
    if ue8m0:
        scales = round_up_to_pow2(scales)
    return regs.divide_rows(x, scales, layout).astype(FP8), scales


def round_up_to_pow2(scales: Array) -> Array:
    """Positive f32 -> the next power of two, exponent 1..254; Inf and NaN stay, to be seen."""
    bits = lax.bitcast_convert_type(scales, I32)
    exponent = jnp.right_shift(bits, 23)
    raised = exponent + jnp.where((bits & 0x7FFFFF) != 0, 1, 0)
    rounded = jnp.minimum(jnp.maximum(raised, 1), 254) << 23
    return lax.bitcast_convert_type(jnp.where(exponent == 255, bits, rounded), F32)
