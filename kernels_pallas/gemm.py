"""The layer's grouped GEMMs: what the arguments mean, and which kernel does which tile.

`grouped_gemm` has tokens on the side of WGMMA that takes steps of 8, for few rows an expert;
`grouped_gemm_wide` on the side of 64, for many. Both give the same bits.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from . import fp4, grouped_gemm, grouped_gemm_wide
from ._common import BF16, F32, FP8, I32
from .act_quant import ACTIVATIONS
from .grouped_gemm import Fused
from .quant import GROUP, Rule, rule_of

ALIGNMENTS = (8, 16, 32, 64, 128)
LARGEST_TILE = 256
TILES = (32, 64, grouped_gemm_wide.ROWS)
"""What `tile_for` chooses from."""


def gemm(
    a: Array,
    a_scales: Array | None,
    b: Array,
    b_scales: Array | None,
    tiles: Array,
    m_indices: Array | None = None,
    masked_m: Array | None = None,
    *,
    alignment: int,
    tile: int,
    slabs: int,
    expected_m: int,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    interpret: bool = False,
) -> Array:
    """Rows of each tile times its expert's weights, accumulated in f32. Needs an SM90 GPU.

    Args:
      a: [M, K] bf16, or float8_e4m3fn with scales; K % 128 == 0, M % alignment == 0.
      a_scales: [slabs * K / 128, S] f32, S = M / slabs rounded up to 4: row r, group g is
        at [r // (M / slabs) * K / 128 + g, r % (M / slabs)]. None for bf16.
      b: [E, N, K] of a's dtype, N % 128 == 0; or, beside FP8 rows, FP4: int32
        [E, N / 64, K / 128, 17, 64], as `fp4.pack` makes it.
      b_scales: [E, N / 128, K / 128] f32, one a 128 x 128 block. None for bf16.
      tiles: [3, n] int32: expert (-1 from the first column without one on), first row, a multiple
        of `alignment`, and number of live rows, 1 to `tile`.
      m_indices, masked_m: what DeepGEMM reads instead of `tiles`; unused.
      alignment: rows from the live ones up to its next multiple may be written, none beyond.
      tile: most rows of a tile: a multiple of `alignment` and at most 256.
      expected_m: DeepGEMM's, too: `tile` says it here.
      recipe_a, recipe_b: (rows, columns) that share a scale: (1, 128) and (128, 128), or None.
      interpret: run on a CPU, in Mosaic GPU interpret mode, where a jnp.dot stands for WGMMA.

    Returns:
      [M, N] bf16. Rows that no tile names are unspecified.

    FP8: each 128 of K is a product of its own in the tensor cores, then multiplied by both scales
    and added in f32 registers (the scheme of DeepGEMM, bit for bit). FP4 gives the bits of the FP8
    weights that it is widened to (`fp4.widen`).

    Raises TypeError or ValueError for a dtype, shape or alignment that does not fit.
    """
    del m_indices, masked_m, expected_m
    _check_recipes(recipe_a, recipe_b)
    _check(a, a_scales, b, b_scales, tiles, alignment, tile, slabs)
    operands = a, a_scales, b, b_scales, tiles
    return _grouped(*operands, tile, None, alignment=alignment, slabs=slabs, interpret=interpret)[0]


def gemm_act_quant(
    a: Array,
    a_scales: Array | None,
    b: Array,
    b_scales: Array | None,
    tiles: Array,
    m_indices: Array | None = None,
    masked_m: Array | None = None,
    *,
    alignment: int,
    tile: int,
    slabs: int,
    expected_m: int,
    activation: str,
    params: tuple[float | None, ...],
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    keep_fp32: bool = True,
    group: int | None = GROUP,
    ue8m0: bool = False,
    packed: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """`act_quant` of `gemm`, bit for bit, without the round trip through memory.

    As `gemm`, with b = [E, 2I, K], gate rows before up rows. The GEMM's result is rounded to bf16,
    as `gemm` would write it; `activation`, `params`, `keep_fp32` and `ue8m0` are `act_quant`'s.
    Returns values [M, I] float8_e4m3fn and scales [slabs * I / 128, S] f32; with group None,
    `act`'s [M, I] bf16 and None. NotImplementedError for scales that `gemm` does not read: groups
    of 32 and packed ones.
    """
    del m_indices, masked_m, expected_m
    if group is not None and rule_of(group, ue8m0, packed) != Rule(ue8m0=ue8m0):
        raise NotImplementedError(
            f"group={group}, packed={packed}: the GEMM that follows reads f32 scales of groups of"
            f" {GROUP}; `gemm` and `act_quant` write the others"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; known: {', '.join(ACTIVATIONS)}")
    _check_recipes(recipe_a, recipe_b)
    _check(a, a_scales, b, b_scales, tiles, alignment, tile, slabs)
    if _size_of(b)[1] % (2 * GROUP):
        raise ValueError(f"b is {b.shape}; it must be [E, 2I, K], I % {GROUP} == 0")
    fused = Fused(activation, tuple(params), group is not None, ue8m0, keep_fp32)
    operands = a, a_scales, b, b_scales, tiles
    out = _grouped(*operands, tile, fused, alignment=alignment, slabs=slabs, interpret=interpret)
    return out if fused.quantized else (out[0], None)


def _grouped(a, a_scales, b, b_scales, tiles, tile, fused, **keywords) -> tuple[Array, ...]:
    narrow, operands = b.dtype == I32, (a, a_scales, b, b_scales, tiles)
    n = _size_of(b)[1]
    if tile == grouped_gemm_wide.ROWS and n % grouped_gemm_wide.COLUMNS == 0 and not narrow:
        config = grouped_gemm_wide.choose_config(n)
        return grouped_gemm_wide.grouped(*operands, config=config, fused=fused, **keywords)
    config = grouped_gemm.choose_config(tile, n, fused=fused is not None, narrow=narrow)
    return grouped_gemm.grouped(*operands, config=config, fused=fused, **keywords)


def tile_for(expected_rows: float) -> tuple[int, int]:
    """(tile, alignment) for the rows expected per expert: one tile for the fullest of some hundred
    experts under balanced routing, which reads weights once, up to the tile of the wide kernel.

    On an H200, w13, activation and w2 in FP8: with H 7168, I 2048, E 256, tiles of 64 took 2953 us
    at 40 rows an expert and the wide kernel 2989, at 64 rows tiles of 96 3050 and the wide 3084;
    with H 2048, I 768, E 128 they took 299 and 279, and 320 and 304.
    """
    fullest = expected_rows + 2.8 * expected_rows**0.5
    tile = next((t for t in TILES if fullest <= t), TILES[-1])
    return tile, 8 if tile == 32 else 16


def fuses(*, fp8: bool) -> bool:
    """Whether `gemm_act_quant` is faster than `gemm` and `act_quant`: 2953 us against 3024 at 40
    rows in the first of those shapes; in the wide kernel w13 takes, fused, 7511 us at 512 rows and
    7802 alone. bf16 products leave no registers for it."""
    return fp8


def _size_of(b: Array) -> tuple[int, int, int]:
    """E, N, K."""
    if b.ndim == 5:
        return b.shape[0], b.shape[1] * fp4.ROWS, b.shape[2] * fp4.COLUMNS
    return b.shape


def _check_recipes(recipe_a, recipe_b) -> None:
    for name, given, known in (("a", recipe_a, (1, GROUP)), ("b", recipe_b, (GROUP, GROUP))):
        if given not in (None, known):
            raise NotImplementedError(f"recipe_{name}={given}: this GEMM reads scales of {known}")


def _check(a, a_scales, b, b_scales, tiles, alignment, tile, slabs) -> None:
    if (a_scales is None) != (b_scales is None):
        raise ValueError("a_scales and b_scales must both be given (FP8) or both be None (bf16)")
    dtype = BF16 if a_scales is None else FP8
    narrow = b.dtype == I32 and a_scales is not None
    if a.ndim != 2 or b.ndim != (5 if narrow else 3) or a.shape[1] != _size_of(b)[2]:
        what = "[E, N / 64, K / 128, 17, 64]" if narrow else "[E, N, K]"
        raise ValueError(f"a is {a.shape} and b {b.shape}; they must be [M, K] and {what}")
    (m, k), (experts, n, _) = a.shape, _size_of(b)
    if k == 0 or k % GROUP or n == 0 or n % GROUP or experts == 0:
        raise ValueError(
            f"E, N, K are {experts}, {n}, {k}; N and K must be positive multiples of {GROUP}"
        )
    if alignment not in ALIGNMENTS or tile <= 0 or tile % alignment or tile > LARGEST_TILE:
        raise ValueError(
            f"alignment is {alignment} and tile {tile}; alignment must be one of {ALIGNMENTS}, and "
            f"tile a multiple of it, at most {LARGEST_TILE}"
        )
    if slabs <= 0 or m % slabs or m // slabs % alignment:
        raise ValueError(
            f"{m} rows in {slabs} slabs: a slab must be a multiple of alignment={alignment}"
        )
    _expect("a", a, dtype, (m, k))
    if narrow:
        _expect("b", b, I32, (experts, n // fp4.ROWS, k // fp4.COLUMNS, *fp4.WORDS))
    else:
        _expect("b", b, dtype, (experts, n, k))
    _expect("tiles", tiles, I32, (3, tiles.shape[-1]))
    if a_scales is not None:
        _expect("a_scales", a_scales, F32, (slabs * k // GROUP, pl.cdiv(m // slabs, 4) * 4))
        _expect("b_scales", b_scales, F32, (experts, n // GROUP, k // GROUP))


def _expect(name: str, array: Array, dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {jnp.dtype(dtype).name}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
