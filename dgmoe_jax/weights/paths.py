"""Load time: from what a checkpoint stores to what a GEMM reads, one expert's matrix at a time.

Pure functions on arrays, in the terms of SGLang's `process_weights_after_loading`:

A  UE8M0 scales to the layout that DeepGEMM reads on SM100   `quantize.stored`, of all recipes
B  FP4 to block FP8                                          `fp4_to_block_fp8`
   or to FP4 that a GEMM widens to the same FP8              `fp4_to_tiles`
C  block FP8 to power-of-two scales                          `block_fp8_to_ue8m0`
D  MXFP8: BF16 weights are quantised (`quantize`), a checkpoint's scales repacked (A), and where
   there are no 1 x 32 scales it becomes block FP8           `mxfp8_to_block_fp8`
E  per-tensor FP8 scales to pseudo blocks                    `per_tensor_scales`
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from dgmoe_jax.kernels_pallas import fp4
from dgmoe_jax.quantize import quantize
from dgmoe_jax.recipes import FP8_128X128, MXFP4_1X32, MXFP4_TILES, MXFP8_1X32, Format
from dgmoe_jax.xla import decode, spread

_BLOCK_UE8M0 = replace(FP8_128X128, ue8m0=True)
_EXPONENT, _ONE = 0x7F800000, 127 << 23  # bits of an f32
_HEADROOM = 6  # FP4's 6 times 2^6 is 384, e4m3 ends at 448


def ue8m0_to_f32(name: str, scales: Array) -> Array:
    """UE8M0 scales as float8_e8m0fnu, as uint8 (the exponent's byte) or as f32 -> f32.

    Byte 0, 2^-127, is below f32's normal numbers and becomes 0.

    Raises ValueError: a NaN (byte 255) or an f32 that is no power of two; not seen while tracing.
    """
    if scales.dtype == jnp.float32:
        broken, given = ~_is_power_of_two(scales) & (scales != 0), scales
    else:
        given = lax.bitcast_convert_type(scales, jnp.uint8)
        broken = given == 255
        scales = lax.bitcast_convert_type(given.astype(jnp.int32) << 23, jnp.float32)
    if not isinstance(broken, jax.core.Tracer) and broken.any():
        first = tuple(int(i[0]) for i in jnp.nonzero(broken, size=1))
        kind = "" if given is scales else "UE8M0 byte "
        raise ValueError(
            f"{name}{list(first)}={kind}{given[first]}, {int(broken.sum())} such in all: scales of"
            " this recipe must be powers of two"
        )
    return scales


def _is_power_of_two(scales: Array) -> Array:
    bits = lax.bitcast_convert_type(scales, jnp.int32)
    return ((bits & ~_EXPONENT) == 0) & (bits > 0) & (bits < _EXPONENT)


def fp4_to_block_fp8(values: Array, scales: Array) -> tuple[Array, Array]:
    """Path B. values [N, K / 2] uint8, scales [N, K / 32] f32 -> [N, K] e4m3, a scale a block f32.

    The rule of DeepSeek-V4's `cast_e2m1fn_to_e4m3fn`: a block's scale is the largest of its groups'
    over 2^6, and the rest of each goes into the values. It promises no loss within 2^6 of the
    largest scale; in fact there is none within 2^14, since E2M1 counts in halves and e4m3 down to
    2^-9. Beyond, values round to multiples of 2^-9 of the block's scale.
    """
    rest, block = _beside_block(scales)
    return decode(values, rest, (1, 32)).astype(jnp.float8_e4m3fn), block


def fp4_to_tiles(values: Array, scales: Array) -> tuple[Array, Array]:
    """As path B, to `kernels_pallas.fp4`: int32 [N / 64, K / 128, 17, 64], a scale a block f32.

    N and K are multiples of 128. Widened, the tiles are path B's FP8, bit for bit.
    """
    rest, block = _beside_block(scales)
    return fp4.pack(values, rest), block


def _beside_block(scales: Array) -> tuple[Array, Array]:
    """Scales of groups of 32 -> what of each is not in its block's, and the blocks'."""
    block = _block_max(scales, 128, 128 // 32) * 2.0**-_HEADROOM
    block = jnp.maximum(block, jnp.finfo(jnp.float32).tiny)
    # A quotient of powers of two by their bits: division on a GPU is not exact.
    bits, by = (
        lax.bitcast_convert_type(x, jnp.int32)
        for x in (scales, spread(block, (128, 128 // 32), scales.shape))
    )
    rest = jnp.where(scales > 0, jnp.maximum(bits - by + _ONE, 0), 0)
    return lax.bitcast_convert_type(rest, jnp.float32), block


def _block_max(x: Array, rows: int, columns: int) -> Array:
    """[N, G] non-negative -> [ceil(N / rows), ceil(G / columns)]."""
    x = jnp.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % columns)))
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return blocks.max(axis=(1, 3))


def block_fp8_to_ue8m0(values: Array, scales: Array) -> tuple[Array, Array]:
    """Path C. values [N, K] e4m3, a f32 scale a 128 x 128 block -> the same with powers of two.

    Blocks whose scale is one keep their bits; others are dequantised and quantised again. SGLang
    rounds them to bf16 in between; this does not.
    """
    keep = _is_power_of_two(scales)
    again = quantize(decode(values, scales, (128, 128)), _BLOCK_UE8M0)
    values = jnp.where(spread(keep, (128, 128), values.shape), values, again.values)
    return values, jnp.where(keep, scales, again.scales)


def mxfp8_to_block_fp8(values: Array, scales: Array) -> tuple[Array, Array]:
    """Path D on SM90. values [N, K] e4m3, scales [N, K / 32] f32 -> the same, a f32 scale a block.

    Requantised: what it loses depends on how far a block's values are apart.
    """
    again = quantize(decode(values, scales, (1, 32)), FP8_128X128)
    return again.values, again.scales


def per_tensor_scales(scale: Array, lead: int, parts: int, n: int, k: int) -> Array:
    """Path E. scale [*lead] f32, or [*lead, parts]: one for each of gate and up -> one a block,
    [*lead, parts * ceil(n / 128), ceil(k / 128)]. `lead` is the number of leading dimensions."""
    rows, columns = FP8_128X128.scales_shape(n, k)
    scale = scale if scale.ndim > lead else jnp.repeat(scale[..., None], parts, axis=-1)
    per_row = jnp.repeat(scale, rows, axis=-1)
    return jnp.broadcast_to(per_row[..., None], (*per_row.shape, columns))


PATHS = {
    (MXFP4_1X32, FP8_128X128): fp4_to_block_fp8,
    (MXFP4_1X32, MXFP4_TILES): fp4_to_tiles,
    (MXFP8_1X32, FP8_128X128): mxfp8_to_block_fp8,
    (FP8_128X128, _BLOCK_UE8M0): block_fp8_to_ue8m0,
}


def convert(
    values: Array, scales: Array | None, source: Format, to: Format
) -> tuple[Array, Array | None, Array]:
    """One expert's matrix in `source` -> values, f32 scales and the relative error (Frobenius) that
    going to `to` has made. How `to` stores its scales is not looked at."""
    to = replace(to, packed_scales=False)
    if to == source:
        return values, scales, jnp.float32(0)
    # What was rounded is what is compared: XLA may keep more than it was told to round to.
    got = lax.optimization_barrier(PATHS[source, to](values, scales))
    was = decode(values, scales, source.group)
    lost = jnp.linalg.norm(decode(*got, to.group) - was)
    return *got, jnp.where(lost > 0, lost / jnp.linalg.norm(was), 0.0)
