"""FP4 weights from shared memory into FP8 registers, where WGMMA takes its first operand from.

Below Pallas, in Mosaic GPU's own terms, since no array operation there takes bytes apart: of the
versions of jax in `_common.TRIED`, and imported for those alone.
"""

from __future__ import annotations

import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ._common import FP8, Registers, spread_rows
from .fp4 import COLUMNS, ROWS, WORDS

_VALUES = spread_rows(WORDS[0] - 1, WORDS[1], 4)
# Two words of each row of threads: `plgpu.Replicated` last, for the four that share them.
_EXPONENTS = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (16,), (2,))),
    warp_dims=(-3,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


def load(tile: object, regs: Registers) -> tuple[Array, Array]:
    """A thread's words of `tile`, int32 [17, 64] in shared memory: values and exponents."""
    rows = WORDS[0] - 1
    return regs.load(tile.at[:rows], _VALUES), regs.load(tile.at[rows], _EXPONENTS)


@plgpu.inline_mgpu(
    arg_types=(_VALUES, _EXPONENTS, plgpu.RefType()),
    return_type=plgpu.ShapeDtypeStruct((ROWS, COLUMNS), FP8, layout=plgpu.Layout.WGMMA_8BIT),
)
def widen(ctx, values, exponents, table):
    """What `load` gave -> [64, 128] float8_e4m3fn, bit for bit `fp4.widen`.

    table: `fp4.TABLE` in shared memory.
    """
    del ctx
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    address = llvm.ptrtoint(i32, mgpu_utils.memref_ptr(table))
    pointer, pair = llvm.PointerType.get(3), ir.VectorType.get((2,), i32)

    def constant(value):
        return arith.constant(i32, ir.IntegerAttr.get(i32, value))

    def element(register, i):
        return vector.extract(register, dynamic_position=[], static_position=[i])

    def magnitudes(row, columns):
        """The eight bytes that a row's 32 columns pick from."""
        [words] = exponents.registers.flat
        at = arith.shrui(element(words, row), constant(8 * columns))
        at = arith.addi(address, arith.andi(at, constant(0xFF)))
        found = llvm.load(pair, llvm.inttoptr(pointer, at))
        return element(found, 0), element(found, 1)

    def signed(pair, picks, signs):
        byte = llvm.inline_asm(i32, [*pair, picks], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")
        signs = arith.andi(signs, constant(0x80808080 - (1 << 32)))
        return arith.ori(byte, signs)

    layout = mgpu.WGMMA_LAYOUT_8BIT
    words = [element(r, i) for r in values.registers.flat for i in range(4)]
    registers = []  # 16 columns at a time: a row, and the row 8 further
    for columns in range(COLUMNS // 32):
        halves = [[], []]
        for row, word in enumerate(words[2 * columns : 2 * columns + 2]):
            pair_of_row = magnitudes(row, columns)
            picks = arith.andi(word, constant(0x77777777))
            halves[0].append(signed(pair_of_row, picks, arith.shli(word, constant(4))))
            halves[1].append(signed(pair_of_row, arith.shrui(picks, constant(16)), word))
        registers += halves[0] + halves[1]
    out = np.empty(layout.registers_shape((ROWS, COLUMNS)), dtype=object)
    for i, register in enumerate(registers):
        # By way of bytes: LLVM knows no float8.
        register = mgpu_utils.bitcast(register, ir.VectorType.get((4,), i8))
        fp8 = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        out.flat[i] = mgpu_utils.bitcast(register, fp8)
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
