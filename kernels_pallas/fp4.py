"""MXFP4 weights as `grouped_gemm` reads them, and how they become FP8: in jnp, any device.

Tiles of 64 rows x 128 columns, int32 [17, 64] each, in the order of WGMMA's first operand in FP8:
of each 32 columns thread 4 g + t of warp w has rows 16 w + g and 16 w + g + 8, columns 4 t to
4 t + 3 and 16 more than that. A word is one thread's and one row's eight values of 32 columns, the
first four in its low half. Words 4 i to 4 i + 3 of the first eight rows are those of thread i for
the first 64 columns: 32 columns and its two rows, then the next 32; the other eight rows are the
last 64 columns.

In a word a nibble's low three bits are a magnitude, by which PRMT picks bytes from a table of
eight. The signs are in the fourth bits, where one mask lays them on their bytes: of the first four
values in the even nibbles, of the others in the odd ones.

The last row has a row's four exponents, in bytes, rows 16 w + g and 16 w + g + 8 side by side: by
how much 32 columns are scaled beside their block of 128 x 128, as the byte at which `TABLE` has
their magnitudes.
"""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, lax

ROWS, COLUMNS = 64, 128  # of a tile
WORDS = (17, 64)
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_EXPONENTS = range(-12, 7)  # beside the block's scale; below, all values round to zero in E4M3


def _table() -> np.ndarray:
    rows = np.zeros((32, 8), np.uint8)  # 256 bytes, whole vectors for every thread that copies it
    for row, exponent in enumerate(_EXPONENTS, 1):
        rows[row] = (_MAGNITUDES * 2.0**exponent).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return rows.view(np.int32).reshape(-1)


TABLE = _table()
"""[64] int32: rows of eight E4M3 bytes, E2M1's magnitudes times 2^-13 (all zero), 2^-12, .. 2^6."""


def pack(values: Array, rest: Array) -> Array:
    """values [N, K / 2] uint8, rest [N, K / 32] f32 -> int32 [N / 64, K / 128, 17, 64].

    N % 64 == 0, K % 128 == 0. rest: powers of two up to 2^6, or 0; what of a group's scale is not
    in its block's.
    """
    n, k = values.shape[0], 2 * values.shape[1]
    tiles = n // ROWS, k // COLUMNS
    codes = jnp.stack([values & 0xF, values >> 4], axis=-1).astype(jnp.uint32)
    # rows: tile, warp, +8, group; columns: tile, two halves, 32, +16, thread, value
    codes = codes.reshape(tiles[0], 4, 2, 8, tiles[1], 2, 2, 2, 4, 4)
    codes = codes.transpose(0, 4, 5, 1, 3, 8, 6, 2, 7, 9)  # .., +16, value
    c, v = jnp.arange(2, dtype=jnp.uint32)[:, None], jnp.arange(4, dtype=jnp.uint32)
    words = ((codes & 7) << (16 * c + 4 * v)) | ((codes >> 3) << (8 * v + 4 * c + 3))
    words = jnp.sum(words, axis=(-2, -1), dtype=jnp.uint32).reshape(*tiles, -1)

    exponent = (lax.bitcast_convert_type(rest, jnp.int32) >> 23) - 127
    at = jnp.clip(exponent - (_EXPONENTS.start - 1), 0, len(_EXPONENTS)).astype(jnp.uint32) * 8
    at = at.reshape(tiles[0], 4, 2, 8, tiles[1], 4).transpose(0, 4, 1, 3, 2, 5)
    at = jnp.sum(at << (8 * jnp.arange(4, dtype=jnp.uint32)), axis=-1, dtype=jnp.uint32)
    words = jnp.concatenate([words, at.reshape(*tiles, -1)], axis=-1)
    return lax.bitcast_convert_type(words, jnp.int32).reshape(*tiles, *WORDS)


def widen(tiles: Array, table: Array | None = None) -> Array:
    """int32 [.., N / 64, K / 128, 17, 64] -> [.., N, K] float8_e4m3fn, as the kernel does it."""
    *lead, down, across, _, _ = tiles.shape
    table = lax.bitcast_convert_type(jnp.asarray(TABLE) if table is None else table, jnp.uint32)
    words = lax.bitcast_convert_type(tiles, jnp.uint32).reshape(-1, 17 * 64)
    words, exponents = words[:, : 16 * 64], words[:, 16 * 64 :]
    words = words.reshape(-1, 2, 4, 8, 4, 2, 2)  # halves, warp, group, thread, 32, +8
    at = (exponents[:, :, None] >> (8 * jnp.arange(4, dtype=jnp.uint32))) & 0xFF
    # as words: by warp, group, +8 and 32 columns -> halves, warp, group, 1, 32, +8
    at = at.reshape(-1, 4, 8, 2, 2, 2).transpose(0, 4, 1, 2, 5, 3)[:, :, :, :, None]
    low, high = table[at >> 2], table[(at >> 2) + 1]

    def bytes_of(picks, signs):
        found = []
        for v in range(4):
            pick = (picks >> (4 * v)) & 7
            byte = jnp.where(pick < 4, low, high) >> (8 * (pick & 3))
            found.append((byte & 0xFF) | ((signs >> (8 * v)) & 0x80))
        return jnp.stack(found, axis=-1)

    both = bytes_of(words, words << 4), bytes_of(words >> 16, words)
    both = jnp.stack(both, axis=-2)  # tile, halves, warp, group, thread, 32, +8, +16, value
    both = both.reshape(-1, across, *both.shape[1:]).transpose(0, 3, 7, 4, 1, 2, 6, 8, 5, 9)
    both = both.astype(jnp.uint8).reshape(*lead, down * ROWS, across * COLUMNS)
    return lax.bitcast_convert_type(both, jnp.float8_e4m3fn)
