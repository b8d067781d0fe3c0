"""Dispatch to expert rows: the move itself, quantising on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import BF16, F32, I32, Registers, for_pieces, launch
from .quant import GROUP, Rule, Units, quantize_tile, quantized_type, rule_of, unit_layout

STEP = 8  # units of a token's row that a block moves: of 128 values, 16 bytes of bf16 a thread


def permute(
    x: Array,
    src2dst: Array,
    *,
    rows: int,
    slabs: int = 1,
    group: int | None = GROUP,
    ue8m0: bool = False,
    packed: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """x [T, K] bf16, src2dst [T, k] int32 -> values [rows, K] float8_e4m3fn, scales.

    Row src2dst[t, j] gets x[t], quantised as by `quant`; `group`, `ue8m0`, `packed` and the layout
    of the scales, in `slabs`: `quant.Rule`. `group` None: the values are bf16 and the scales None.
    Each token is read once and written up to k times; rows that src2dst does not name are not
    written.

    Raises ValueError for shapes or dtypes that do not fit, and what `quant` raises.
    """
    scaled = group is not None
    rule = rule_of(group, ue8m0, packed) if scaled else Rule()
    if x.ndim != 2 or x.dtype != BF16 or x.shape[1] % GROUP:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be bf16 [T, K], K % 128 == 0")
    t, width = x.shape
    if src2dst.ndim != 2 or src2dst.shape[0] != t or src2dst.dtype != I32:
        raise ValueError(
            f"src2dst is {src2dst.dtype}{list(src2dst.shape)}; it must be int32 [{t}, k]"
        )
    if rows % slabs:
        raise ValueError(f"rows={rows} must be a multiple of slabs={slabs}")
    units, capacity, k = Units(width, rule), rows // slabs, src2dst.shape[1]
    if scaled:
        out_types = units.out_types(rows, slabs)
    else:
        out_types = (jax.ShapeDtypeStruct((rows, *units.view), BF16),)
    blocks = pl.cdiv(max(units.whole, 1), STEP)

    def move(x_ref, src2dst_ref, values_ref, *scales_ref):
        token, block = lax.axis_index("t"), lax.axis_index("u")
        dst = [src2dst_ref[token, j] for j in range(k)]

        def move_units(here, count, groups):
            if count > 1:
                here = pl.ds(here, count)
            at, layout = units.at(here, groups), unit_layout(count, groups, rule.group)
            shape = (*(n for n in (count, groups) if n > 1), rule.group)
            values = regs.load_as(x_ref.at[token, at], shape, layout)
            if scaled:
                values, scales = quantize_tile(values.astype(F32), layout, rule, regs, groups)
            for d in dst:

                @pl.when(d >= 0)
                def _(d=d):
                    regs.store(values_ref.at[d, at], values)
                    if scaled:
                        slab, row = (
                            (0, d) if slabs == 1 else (lax.div(d, capacity), lax.rem(d, capacity))
                        )
                        units.store_scales(scales_ref[0], slab, here, row, scales, regs)

        def move_whole(start, count):
            move_units(block * STEP + start, count, rule.unit)

        if units.whole:
            for_pieces(move_whole, block, units.whole, STEP)
        if units.rest:
            pl.when(block == blocks - 1)(lambda: move_units(units.whole, 1, units.rest))

    regs = Registers(interpret)
    if t == 0 or k == 0 or rows == 0:
        out = [jnp.zeros(o.shape, o.dtype) for o in out_types]
    else:
        out = launch(
            move,
            out_types,
            # A column of all tokens at a time: 384 us for 16384 x 7168 to 8 rows each, against 446,
            # of which the scales' scattered 4 bytes are 70 and 134.
            grid={"u": blocks, "t": t},
            interpret=interpret,
            barriers=False,
        )(x.reshape(t, *units.view), src2dst)
    values = out[0].reshape(rows, width)
    if not scaled:
        return values, None
    return values, out[1].reshape(quantized_type(rows, width, rule, slabs)[1].shape)
