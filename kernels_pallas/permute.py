"""Dispatch to expert rows: the move itself, quantising on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import BF16, F32, I32, Registers, for_pieces, launch
from .quant import GROUP, check_group, quantize_tile, quantized_type, row_layout

STEP = 8  # groups of a token's row that a block moves: 16 bytes of bf16 a thread


def permute(
    x: Array,
    src2dst: Array,
    *,
    rows: int,
    slabs: int = 1,
    group: int | None = GROUP,
    ue8m0: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """x [T, K] bf16, src2dst [T, k] int32 -> values [rows, K] float8_e4m3fn, scales [slabs * G, S].

    Row src2dst[t, j] gets x[t], quantised as by `quant`. G = K / 128, S = rows / slabs up to 4s:
    row r's scales lie in column r % (rows / slabs) of slab r // (rows / slabs). `group` None: the
    values are bf16 and the scales None. Each token is read once and written up to k times; rows
    that src2dst does not name are not written.

    Raises ValueError for shapes or dtypes that do not fit, NotImplementedError for another group.
    """
    scaled = group is not None
    if scaled:
        check_group(group)
    if x.ndim != 2 or x.dtype != BF16 or x.shape[1] % GROUP:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be bf16 [T, K], K % 128 == 0")
    t, width = x.shape
    if src2dst.ndim != 2 or src2dst.shape[0] != t or src2dst.dtype != I32:
        raise ValueError(
            f"src2dst is {src2dst.dtype}{list(src2dst.shape)}; it must be int32 [{t}, k]"
        )
    if rows % slabs:
        raise ValueError(f"rows={rows} must be a multiple of slabs={slabs}")
    groups, capacity, k = width // GROUP, rows // slabs, src2dst.shape[1]
    values_type, scales_type = quantized_type(rows, width, slabs)
    if scaled:
        scales_type = scales_type.update(shape=(slabs, groups, scales_type.shape[1]))
        out_types = (values_type.update(shape=(rows, groups, GROUP)), scales_type)
    else:
        out_types = (jax.ShapeDtypeStruct((rows, groups, GROUP), BF16),)

    def move(x_ref, src2dst_ref, values_ref, *scales_ref):
        token, column = lax.axis_index("t"), lax.axis_index("g")
        dst = [src2dst_ref[token, j] for j in range(k)]

        def move_groups(start, count):
            here = column * STEP + start
            here = here if count == 1 else pl.ds(here, count)
            layout = row_layout(count)
            values = regs.load(x_ref.at[token, here, :], layout)
            if scaled:
                values, scales = quantize_tile(values.astype(F32), layout, ue8m0, regs)
            for d in dst:

                @pl.when(d >= 0)
                def _(d=d):
                    values_ref[d, here, :] = values
                    if scaled:
                        slab, row = (
                            (0, d) if slabs == 1 else (lax.div(d, capacity), lax.rem(d, capacity))
                        )
                        scales_ref[0][slab, here, row] = scales

        for_pieces(move_groups, column, groups, STEP)

    regs = Registers(interpret)
    if t == 0 or k == 0 or rows == 0:
        out = [jnp.zeros(o.shape, o.dtype) for o in out_types]
    else:
        out = launch(
            move,
            out_types,
            # A column of all tokens at a time: 384 us for 16384 x 7168 to 8 rows each, against 446,
            # of which the scales' scattered 4 bytes are 70 and 134.
            grid={"g": pl.cdiv(groups, STEP), "t": t},
            interpret=interpret,
            barriers=False,
        )(x.reshape(t, groups, GROUP), src2dst)
    return out[0].reshape(rows, width), out[1].reshape(slabs * groups, -1) if scaled else None
