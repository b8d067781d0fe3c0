"""Arrays into and out of every format, in jnp: load time, tests and small tensors.

The layer's own activations go through the `quant` step instead, whose scales are MN-major.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from dgmoe_jax.interop.scales import pack_ue8m0
from dgmoe_jax.recipes import Format, format_named
from dgmoe_jax.types import Scaled
from dgmoe_jax.xla import decode, divide, largest, scale_of, spread


def quantize(x: Array, spec: str | Format, *, ue8m0: bool | None = None) -> Scaled:
    """x [..., N, K] (or [..., K] for formats of one row) bf16 or f32 -> `Scaled`.

    Per group: scale = max(amax, 1e-10) / peak (`ue8m0`: rounded up to a power of two), values
    clamped to the format's range and rounded to nearest even. Groups at the edges may be short.
    scales: [..., ceil(N / group rows), ceil(K / group columns)] f32, or as `Scaled` has them.

    Args:
      spec: "bf16", "fp8_1x128", "fp8_128x128", "mxfp8_1x32" or "mxfp4_1x32", or a `Format`.
      ue8m0: power-of-two scales, where the format has the choice (default: the format's own).

    Raises:
      ValueError: unknown `spec`; x has too few dimensions; a packed format with odd K.
      TypeError: x is not a float array.
    """
    fmt = format_named(spec, ue8m0)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: dtype {x.dtype}, must be a float")
    if fmt.tile is not None:
        raise ValueError(f"spec={fmt.name!r}: made from mxfp4_1x32 by prepare_params, not from x")
    if fmt.group is None:
        return Scaled(x.astype(fmt.dtype), None, fmt)
    if x.ndim < (1 if fmt.group[0] == 1 else 2) or x.shape[-1] % fmt.packed:
        raise ValueError(f"x: shape {x.shape} does not fit {fmt.name}")
    x = x.astype(jnp.float32)
    scales = scale_of(_amax(x, fmt.group), fmt.peak, fmt.ue8m0)
    values = jnp.clip(divide(x, spread(scales, fmt.group, x.shape)), -fmt.peak, fmt.peak)
    scales = stored(scales, fmt, x.shape[-2] if x.ndim > 1 else 1)
    if fmt.packed == 2:
        nibbles = lax.bitcast_convert_type(values.astype(jnp.float4_e2m1fn), jnp.uint4)
        low, high = nibbles[..., ::2].astype(jnp.uint8), nibbles[..., 1::2].astype(jnp.uint8)
        return Scaled(low | (high << 4), scales, fmt)
    return Scaled(values.astype(fmt.dtype), scales, fmt)


def dequantize(scaled: Scaled) -> Array:
    """`Scaled` -> [..., K] f32: values times their group's scale."""
    return decode(scaled.values, scaled.scales, scaled.format.shares)


def stored(scales: Array, fmt: Format, n: int) -> Array:
    """f32 scales, one a group, of `n` rows -> as `fmt` stores them. Packed, they must be powers of
    two: others raise ValueError or, while tracing, become NaN."""
    if not fmt.packed_scales:
        return scales
    rows = fmt.group[0]
    return pack_ue8m0(jnp.repeat(scales, rows, axis=-2)[..., :n, :] if rows > 1 else scales)


def _amax(x: Array, group: tuple[int, int]) -> Array:
    rows, columns = group
    tail = [(0, 0)] * x.ndim
    tail[-1] = (0, -x.shape[-1] % columns)
    if rows > 1:
        tail[-2] = (0, -x.shape[-2] % rows)
    x = jnp.pad(x, tail)
    *lead, n, k = (1, *x.shape) if x.ndim == 1 else x.shape
    blocks = largest(x.reshape(*lead, n // rows, rows, k // columns, columns), (-3, -1))
    return blocks[0] if x.ndim == 1 else blocks
