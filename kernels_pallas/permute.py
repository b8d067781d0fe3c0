"""Dispatch to expert rows: the move itself, of rows quantised on the way or as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import BF16, F32, FP8, I32, Registers, for_pieces, launch, own_index, piece, vector
from .quant import GROUP, PACK, Rule, Units, quantize_tile, quantized_type, rule_of, unit_layout

STEP = 8  # units of a token's row that a block quantises: of 128 values, 16 bytes of bf16 a thread
VECTOR = 16  # bytes that a thread takes of a row that is moved as it is
BYTES = 128 * VECTOR  # that a block takes


def permute(
    x: Array,
    src2dst: Array,
    *,
    rows: int,
    slabs: int = 1,
    group: int | None = GROUP,
    ue8m0: bool = False,
    packed: bool = False,
    scales: Array | None = None,
    width: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """x [T, W], src2dst [T, k] int32 -> values [rows, K], scales.

    Row src2dst[t, j] (-1: none) gets x[t, :K], where K is `width` or, by default, W: a row that
    crossed the wire may carry more behind its values. Each token is read once and written up to k
    times; rows that src2dst does not name are not written. x is one of

    - bf16, quantised on the way as by `quant`; `group`, `ue8m0`, `packed` and the layout of the
      scales, in `slabs`: `quant.Rule`;
    - with `scales`, float8_e4m3fn that was quantised by that rule before. They have a row for each
      token: [T, K / group] f32, or if `packed` [T, ceil(K / group / 4)] int32. Both are moved bit
      for bit, the scales to where they would be if quantised on the way;
    - with `group` None, of any dtype of 8 or 16 bits but bool, moved bit for bit; scales are None.

    Raises ValueError for shapes or dtypes that do not fit, and what `quant` raises.
    """
    rule = Rule() if group is None else rule_of(group, ue8m0, packed)
    width = x.shape[-1] if width is None else width
    _check(x, src2dst, rows, slabs, group, rule, scales, width)
    if group is None or scales is not None:
        return _move(x, src2dst, rows, slabs, rule, scales, width, interpret)
    units, capacity, (t, k) = Units(width, rule), rows // slabs, src2dst.shape
    out_types = units.out_types(rows, slabs)
    blocks = pl.cdiv(max(units.whole, 1), STEP)

    def move(x_ref, src2dst_ref, values_ref, scales_ref):
        token, block = own_index("t"), own_index("u")
        dst = [src2dst_ref[token, j] for j in range(k)]

        def move_units(here, count, groups):
            if count > 1:
                here = pl.ds(here, count)
            at, layout = units.at(here, groups), unit_layout(count, groups, rule.group)
            shape = (*(n for n in (count, groups) if n > 1), rule.group)
            values = regs.load_as(x_ref.at[token, at], shape, layout)
            values, scales = quantize_tile(values.astype(F32), layout, rule, regs, groups)
            for d in dst:

                @pl.when(d >= 0)
                def _(d=d):
                    regs.store(values_ref.at[d, at], values)
                    slab, row = _place(d, slabs, capacity)
                    units.store_scales(scales_ref, slab, here, row, scales, regs)

        def move_whole(start, count):
            move_units(block * STEP + start, count, rule.unit)

        if units.whole:
            for_pieces(move_whole, block, units.whole, STEP)
        if units.rest:
            pl.when(block == blocks - 1)(lambda: move_units(units.whole, 1, units.rest))

    regs = Registers(interpret)
    x = x.reshape(t, x.shape[1] // GROUP, *units.view[1:])
    values, scales = _launch(move, (x, src2dst), out_types, blocks, interpret)
    scales = scales.reshape(quantized_type(rows, width, rule, slabs)[1].shape)
    return values.reshape(rows, width), scales


def _move(
    x: Array,
    src2dst: Array,
    rows: int,
    slabs: int,
    rule: Rule,
    scales: Array | None,
    width: int,
    interpret: bool,
) -> tuple[Array, Array | None]:
    """`permute` of rows as they are: nothing but loads and stores, so that every bit stays."""
    k, capacity, size = src2dst.shape[1], rows // slabs, x.dtype.itemsize
    operands, out_types = (x, src2dst), (jax.ShapeDtypeStruct((rows, width), x.dtype),)
    if scales is not None:
        words, scales_type = scales.shape[1], quantized_type(rows, width, rule, slabs)[1]
        operands += (scales,)
        out_types += (scales_type.update(shape=(slabs, words, scales_type.shape[1])),)
    step = BYTES // size // GROUP
    words_step = BYTES // rule.group // (PACK if rule.packed else 1)

    def move(x_ref, src2dst_ref, *refs):
        scales_ref, values_ref, placed_ref = (None, *refs, None) if scales is None else refs
        token, block = own_index("t"), own_index("u")
        dst = [src2dst_ref[token, j] for j in range(k)]

        def move_values(start, count):
            at = pl.ds((block * step + start) * GROUP, count * GROUP)
            values = regs.load(x_ref.at[token, at], vector(count * GROUP, VECTOR // size))
            for d in dst:

                @pl.when(d >= 0)
                def _(d=d):
                    values_ref[d, at] = values

        def move_scales(start, count):
            at, _, layout = piece(block * words_step, start, count)
            loaded = regs.load(scales_ref.at[token, at], layout)
            for d in dst:

                @pl.when(d >= 0)
                def _(d=d):
                    slab, row = _place(d, slabs, capacity)
                    placed_ref[slab, at, row] = loaded

        # A buffer of received rows has room for many that were not sent.
        @pl.when(functools.reduce(jnp.maximum, dst) >= 0)
        def _():
            for_pieces(move_values, block, width // GROUP, step)
            if scales is not None:
                for_pieces(move_scales, block, words, words_step)

    regs, blocks = Registers(interpret), pl.cdiv(width // GROUP, step)
    values, *placed = _launch(move, operands, out_types, blocks, interpret)
    return values, placed[0].reshape(scales_type.shape) if placed else None


def _launch(
    move: Callable, operands: tuple, out_types: tuple, blocks: int, interpret: bool
) -> tuple[Array, ...]:
    """`move` for each token and block of its row; zeros if there is nothing to move."""
    t, k = operands[1].shape
    if 0 in (t, k, out_types[0].shape[0]):
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out_types)
    # A column of all tokens at a time: 384 us for 16384 x 7168 to 8 rows each, against 446, of
    # which the scales' scattered 4 bytes are 70 and 134.
    grid = {"u": blocks, "t": t}
    return launch(move, out_types, grid=grid, interpret=interpret, barriers=False)(*operands)


def _place(row: Array, slabs: int, capacity: int) -> tuple[Array | int, Array]:
    """The slab that a row lies in, and where there."""
    return (0, row) if slabs == 1 else (lax.div(row, capacity), lax.rem(row, capacity))


def _check(
    x: Array,
    src2dst: Array,
    rows: int,
    slabs: int,
    group: int | None,
    rule: Rule,
    scales: Array | None,
    width: int,
) -> None:
    if group is None:
        fits = x.dtype != bool and jax.dtypes.itemsize_bits(x.dtype) in (8, 16)
        wanted = "of 8 or 16 bits, no bool,"
    else:
        wanted = "bf16" if scales is None else "float8_e4m3fn"
        fits = x.dtype == (BF16 if scales is None else FP8)
    if x.ndim != 2 or not fits or x.shape[1] % GROUP:
        raise ValueError(f"x is {_type(x)}; it must be {wanted} [T, W], W % 128 == 0")
    t = x.shape[0]
    if width % GROUP or not 0 < width <= x.shape[1]:
        raise ValueError(f"width={width} must be a multiple of 128, at most {x.shape[1]}")
    if src2dst.ndim != 2 or src2dst.shape[0] != t or src2dst.dtype != I32:
        raise ValueError(f"src2dst is {_type(src2dst)}; it must be int32 [{t}, k]")
    if rows % slabs:
        raise ValueError(f"rows={rows} must be a multiple of slabs={slabs}")
    if scales is None:
        return
    if group is None:
        raise ValueError(f"scales is {_type(scales)}; with group=None it must be None")
    one_row = quantized_type(1, width, rule)[1]
    wanted = one_row.update(shape=(t, one_row.shape[0]))
    if (scales.shape, scales.dtype) != (wanted.shape, wanted.dtype):
        raise ValueError(f"scales is {_type(scales)}; it must be {_type(wanted)}")


def _type(array: Array | jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}{list(array.shape)}"
