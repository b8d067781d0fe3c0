"""How a row of a matrix is encoded: formats and recipes as data.

A *format* says how one operand's numbers are stored; a *recipe* pairs the activations' format with
the weights'. Which rows are real is the layout's business (`dgmoe_jax.layouts`), never this one's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Format:
    """How one operand is stored.

    name:   spelling used by `quantize` and in error messages.
    dtype:  storage dtype of the values.
    group:  (rows, columns) that share one scale, or None for an unscaled format.
    peak:   largest magnitude the values can hold; scale = amax / peak.
    ue8m0:  scales are powers of two (rounded up) instead of any f32.
    packed: values stored in one element of `dtype` along K.
    """

    name: str
    dtype: str
    group: tuple[int, int] | None = None
    peak: float | None = None
    ue8m0: bool = False
    packed: int = 1


BF16 = Format("bf16", "bfloat16")
FP8_1X128 = Format("fp8_1x128", "float8_e4m3fn", (1, 128), 448.0)
FP8_128X128 = Format("fp8_128x128", "float8_e4m3fn", (128, 128), 448.0)
MXFP8_1X32 = Format("mxfp8_1x32", "float8_e4m3fn", (1, 32), 448.0, ue8m0=True)
MXFP4_1X32 = Format("mxfp4_1x32", "uint8", (1, 32), 6.0, ue8m0=True, packed=2)

FORMATS = {f.name: f for f in (BF16, FP8_1X128, FP8_128X128, MXFP8_1X32, MXFP4_1X32)}


def format_named(spec: str | Format, ue8m0: bool | None = None) -> Format:
    """The format `spec`, or the one called so, with power-of-two scales if `ue8m0`.

    Raises ValueError for an unknown name, and for `ue8m0=False` where the format has no choice.
    """
    if not isinstance(spec, Format) and spec not in FORMATS:
        raise ValueError(f"spec={spec!r}: must be one of {sorted(FORMATS)}")
    fmt = spec if isinstance(spec, Format) else FORMATS[spec]
    if ue8m0 is None or fmt.ue8m0 == ue8m0:
        return fmt
    if fmt.group is None or FORMATS.get(fmt.name, fmt).ue8m0:
        raise ValueError(f"ue8m0={ue8m0}: {fmt.name} always has ue8m0={fmt.ue8m0}")
    return replace(fmt, ue8m0=ue8m0)


@dataclass(frozen=True)
class Recipe:
    """Formats of the two operands of the expert GEMMs."""

    name: str
    activations: Format
    weights: Format


RECIPES = {
    r.name: r
    for r in (
        Recipe("bf16", BF16, BF16),
        Recipe("fp8_block", FP8_1X128, FP8_128X128),
        Recipe("mxfp8", MXFP8_1X32, MXFP8_1X32),
        Recipe("mxfp4", FP8_1X128, MXFP4_1X32),
    )
}

# Recipes whose GEMMs exist, by the architecture `arch` names ("cpu", "sm90", ...).
# DeepGEMM's SM100 kernels read fp8_block scales as packed UE8M0, which is not written yet.
RUNS_ON = {
    "bf16": ("cpu", "gpu", "sm90", "sm100"),
    "fp8_block": ("cpu", "gpu", "sm90", "sm100"),
    "mxfp8": (),
    "mxfp4": (),
}

TILE = 128
"""Hidden and intermediate sizes are padded to a multiple of this inside the layer."""


def padded(size: int) -> int:
    """`size` rounded up to a whole number of 128-wide scale groups."""
    return -(-size // TILE) * TILE
