"""Grouped GEMM on Hopper's tensor cores, bf16 or FP8 with f32 scales, contiguous layout.

The product is computed transposed, D^T = W x^T: WGMMA's first operand always has 64 rows, and there
are always 64 weight rows to give it, where an expert may have a single token. Tokens are the second
operand, of 8 to 128 columns.

A persistent grid: one warpgroup of a block loads K blocks of weights, tokens and scales into a ring
of shared memory, running ahead into the next tile, the others compute. Tiles are ordered by rows,
then columns, so that blocks of one expert run together and share its weights in the L2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import _PARAMS, BF16, F32, FP8, I32, Registers, interpreter

GROUP = 128  # values that share a scale: along K in a, along N and K in b
ALIGNMENTS = (8, 16, 32, 64, 128)

_ROW_BYTES = 128  # of K in a stage: the widest swizzle, 64 bf16 or 128 FP8 values
_WGMMA_ROWS = 64
_SMS = 132  # of an H100 or H200 SXM
_SMEM_BYTES = 227 * 1024
_SMEM_RESERVED = 5 * 1024  # Mosaic's reduction scratch, barriers, alignment of the buffers
_PRODUCER_REGISTERS = 40


class Tile(NamedTuple):
    """Shape of the work that a block does at a time, and of its shared memory."""

    columns: int  # of the output, which are rows of the weights
    warpgroups: int  # that compute, each its part of the columns
    widths: tuple[int, ...]  # numbers of token rows there is code for; the last is the alignment
    stages: int  # K blocks in flight

    @property
    def rows(self) -> int:
        return self.widths[-1]

    @property
    def halves(self) -> int:
        """WGMMA operands of 64 weight rows that a warpgroup takes one after the other."""
        return self.columns // (_WGMMA_ROWS * self.warpgroups)


def gemm(
    a: Array,
    a_scales: Array | None,
    b: Array,
    b_scales: Array | None,
    m_indices: Array,
    *,
    alignment: int,
    interpret: bool = False,
) -> Array:
    """Row r of the result is `a[r] @ b[m_indices[r]].T`, accumulated in f32. Needs an SM90 GPU.

    Args:
      a: [M, K] bf16, or float8_e4m3fn with scales; K % 128 == 0. M = 0 is allowed.
      a_scales: [K / 128, M4] f32, M4 = M rounded up to 4: one a row and 128 values. None for bf16.
      b: [E, N, K] of a's dtype, N % 128 == 0.
      b_scales: [E, N / 128, K / 128] f32, one a 128 x 128 block. None for bf16.
      m_indices: [M] int32, the expert of each row, -1 for padding. Live rows of a block of
        `alignment` rows come first in it and name the same expert; a block whose first row is
        padding is skipped, its weights unread.
      alignment: rows in a block: 8, 16, 32, 64 or 128.
      interpret: run on a CPU, in Mosaic GPU interpret mode, where a jnp.dot stands for WGMMA.

    Returns:
      [M, N] bf16. Rows whose m_indices is -1 are unspecified.

    FP8: each 128 of K is a product of its own in the tensor cores, then multiplied by both scales
    and added in f32 registers (the scheme of DeepGEMM).

    Raises TypeError or ValueError for a dtype, shape or alignment that does not fit.
    """
    _check(a, a_scales, b, b_scales, m_indices, alignment)
    tile = choose_tile(a.shape[0], b.shape[1], alignment)
    return gemm_tiled(a, a_scales, b, b_scales, m_indices, tile=tile, interpret=interpret)


def choose_tile(m: int, n: int, alignment: int) -> Tile:
    """The tile for M rows and N columns.

    Up to 64 rows an expert the time is that of reading weights, and narrow code for blocks with few
    live rows saves loads of tokens (E 256, N 4096, K 7168, FP8, T 16: 718 us against 764). At 128
    it is that of the tensor cores and of the L2, which 256 columns spare (136 us against 150 for M
    2048); there narrow code costs more than it saves (T 4096: 3328 us against 2946), as the static
    schedule gives some SMs more of the wide tiles than others.
    """
    columns = 128
    if alignment <= 32:
        widths = (8, 32)
    elif alignment == 64:
        widths = (32, 64)
    else:
        widths = (128,)
        if n % 256 == 0 and m // alignment * (n // 256) >= _SMS:
            columns = 256
    widths = (*(w for w in widths if w < alignment), alignment)
    return Tile(columns, 2, widths, most_stages(columns, 2, alignment))


def most_stages(columns: int, warpgroups: int, rows: int) -> int:
    outputs = warpgroups * rows * _WGMMA_ROWS * 2
    stage = (columns + rows) * _ROW_BYTES + _scale_rows(rows) * 4
    return min(12, (_SMEM_BYTES - _SMEM_RESERVED - outputs) // stage)


def _scale_rows(rows: int) -> int:
    # A copy into shared memory must have a multiple of 128 bytes.
    return max(rows, 32)


@functools.partial(jax.jit, static_argnames=("tile", "interpret"), inline=True)
def gemm_tiled(
    a: Array,
    a_scales: Array | None,
    b: Array,
    b_scales: Array | None,
    m_indices: Array,
    *,
    tile: Tile,
    interpret: bool,
) -> Array:
    """`gemm` with the tile given."""
    live_m, k = a.shape
    n = b.shape[1]
    if live_m == 0:
        return jnp.zeros((0, n), BF16)
    tail = -live_m % tile.rows
    if tail:
        a = jnp.pad(a, ((0, tail), (0, 0)))
        m_indices = jnp.pad(m_indices, (0, tail), constant_values=-1)
    m = live_m + tail
    scaled = a_scales is not None
    operands = (a, b, m_indices)
    if scaled:
        # What the last block's copy reads.
        missing = m - tile.rows + _scale_rows(tile.rows) - a_scales.shape[1]
        if missing > 0:
            a_scales = jnp.pad(a_scales, ((0, 0), (0, missing)))
        operands += (a_scales, b_scales)

    depth = _ROW_BYTES // a.dtype.itemsize
    k_steps, n_tiles = k // depth, n // tile.columns
    tiles = (m // tile.rows) * n_tiles
    grid = min(_SMS, tiles)
    regs = Registers(interpret)
    accumulator, token_vector = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
    own_rows = _WGMMA_ROWS * tile.halves

    def kernel(*refs):
        a_ref, b_ref, m_indices_ref, *scale_refs, out_ref = refs[: len(operands) + 1]
        a_smem, b_smem, out_smem, full, empty, *scale_smem = refs[len(operands) + 1 :]
        warpgroup = lax.axis_index("warpgroup")
        if scaled:
            (a_scales_ref, b_scales_ref), (a_scales_smem,) = scale_refs, scale_smem

        def look(turn):
            """(expert, index into widths) of this block's tile number `turn`; -1 to skip it."""
            index = lax.axis_index("block") + turn * grid
            row = lax.div(jnp.minimum(index, tiles - 1), n_tiles) * tile.rows
            expert = jnp.where(index < tiles, m_indices_ref[row], -1)
            width = jnp.int32(0)
            for w in tile.widths[:-1]:
                width += (m_indices_ref[row + w] >= 0).astype(I32)
            return expert, width

        def walk(per_width):
            """Runs one of `per_width` on each tile; it gets expert, tile and the first K step.
            Returns the number of K steps."""

            def turn(i, carry):
                step, expert, width = carry
                # Read a tile ahead: neither role then waits for it.
                following = look(i + 1)
                index = lax.axis_index("block") + i * grid
                row, column = lax.div(index, n_tiles) * tile.rows, lax.rem(index, n_tiles)

                @pl.when(expert >= 0)
                def _():
                    branches = [functools.partial(f, expert, row, column, step) for f in per_width]
                    if len(branches) == 1:
                        branches[0]()
                    else:
                        lax.switch(width, branches)

                return step + jnp.where(expert >= 0, k_steps, 0), *following

            return lax.fori_loop(0, pl.cdiv(tiles, grid), turn, (jnp.int32(0), *look(0)))[0]

        def acquire(step):
            slot = lax.rem(step, tile.stages)
            pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            return slot

        def load(width, expert, row, column, first):
            def body(i, _):
                slot = acquire(first + i)
                depths = pl.ds(i * depth, depth)
                plgpu.copy_gmem_to_smem(
                    b_ref.at[expert, pl.ds(column * tile.columns, tile.columns), depths],
                    b_smem.at[slot],
                    full.at[slot],
                )
                plgpu.copy_gmem_to_smem(
                    a_ref.at[pl.ds(row, width), depths],
                    a_smem.at[slot, pl.ds(0, width)],
                    full.at[slot],
                )
                if scaled:
                    copied = _scale_rows(width)
                    plgpu.copy_gmem_to_smem(
                        a_scales_ref.at[i, pl.ds(row, copied)],
                        a_scales_smem.at[slot, pl.ds(0, copied)],
                        full.at[slot],
                    )

            lax.fori_loop(0, k_steps, body, None)

        def wgmma_operands(slot, width, half, rows):
            weights = pl.ds(warpgroup * own_rows + half * _WGMMA_ROWS, rows)
            tokens = a_smem.at[slot, pl.ds(0, width)]
            return b_smem.at[slot, weights], tokens.transpose((1, 0))

        def accumulate_in_place(width, first):
            """bf16: the tensor cores keep the sum."""

            def scope(acc):
                def body(i, _):
                    step = first + i
                    slot = lax.rem(step, tile.stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, *wgmma_operands(slot, width, 0, own_rows))
                    plgpu.wgmma_wait(1)
                    previous = lax.rem(step + tile.stages - 1, tile.stages)
                    pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[previous]))

                lax.fori_loop(0, k_steps, body, None)
                total = acc[...]
                plgpu.barrier_arrive(empty.at[lax.rem(first + k_steps - 1, tile.stages)])
                return total

            total = pl.run_scoped(scope, plgpu.ACC((own_rows, width)))
            starts = range(0, own_rows, _WGMMA_ROWS)
            return [lax.slice(total, (r, 0), (r + _WGMMA_ROWS, width)) for r in starts]

        def product(slot, width, half):
            weights, tokens = wgmma_operands(slot, width, half, _WGMMA_ROWS)
            if interpret:  # whose wgmma takes no transposed operand
                tokens = a_smem[slot, pl.ds(0, width)]
                return jnp.dot(weights[...].astype(F32), tokens.astype(F32).T)

            def scope(acc):
                plgpu.wgmma(acc, weights, tokens)
                return acc[...]

            return pl.run_scoped(scope, plgpu.ACC((_WGMMA_ROWS, width)))

        def accumulate_in_registers(width, expert, column, first):
            """FP8: each K block's product is scaled before it is added. Also bf16, interpreted."""
            group = lax.div(column * tile.columns + warpgroup * own_rows, GROUP)

            def b_scale_at(i):
                return b_scales_ref[expert, group, i] if scaled else jnp.float32(1)

            def body(i, carry):
                b_scale, *totals = carry
                next_b_scale = b_scale_at(jnp.minimum(i + 1, k_steps - 1))
                slot = lax.rem(first + i, tile.stages)
                plgpu.barrier_wait(full.at[slot])
                scales = b_scale
                if scaled:
                    scales *= regs.load(a_scales_smem.at[slot, pl.ds(0, width)], token_vector)
                    scales = lax.broadcast_in_dim(scales, (_WGMMA_ROWS, width), (1,))
                    scales = regs.cast(scales, accumulator)
                for half in range(tile.halves):
                    partial = product(slot, width, half)
                    if half == tile.halves - 1:
                        plgpu.barrier_arrive(empty.at[slot])
                    totals[half] += partial * scales
                return next_b_scale, *totals

            zero = regs.cast(jnp.zeros((_WGMMA_ROWS, width), F32), accumulator)
            init = (b_scale_at(0), *[zero] * tile.halves)
            return lax.fori_loop(0, k_steps, body, init)[1:]

        def compute(width, expert, row, column, first):
            if scaled or interpret:
                totals = accumulate_in_registers(width, expert, column, first)
            else:
                totals = accumulate_in_place(width, first)
            staged = out_smem.at[warpgroup, pl.ds(0, width)]
            for half, total in enumerate(totals):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                total = total.astype(BF16)
                if interpret:
                    staged[...] = total.T
                else:
                    total = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
                    staged.transpose((1, 0))[...] = total
                plgpu.commit_smem()
                first_column = column * tile.columns + warpgroup * own_rows + half * _WGMMA_ROWS
                plgpu.copy_smem_to_gmem(
                    staged, out_ref.at[pl.ds(row, width), pl.ds(first_column, _WGMMA_ROWS)]
                )

        def producer():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            steps = walk([functools.partial(load, width) for width in tile.widths])
            if interpret:  # which wants every phase of a barrier seen
                for i in range(tile.stages):
                    acquire(steps + i)

        def consumer():
            plgpu.set_max_registers(_consumer_registers(tile.warpgroups), action="increase")
            walk([functools.partial(compute, width) for width in tile.widths])
            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == tile.warpgroups, producer, consumer)

    def swizzled(shape, dtype):
        transforms = (
            plgpu.TilingTransform((8, _ROW_BYTES // jnp.dtype(dtype).itemsize)),
            plgpu.SwizzleTransform(_ROW_BYTES),
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    scratch = [
        swizzled((tile.stages, tile.rows, depth), a.dtype),
        swizzled((tile.stages, tile.columns, depth), a.dtype),
        swizzled((tile.warpgroups, tile.rows, _WGMMA_ROWS), BF16),
        plgpu.Barrier(num_arrivals=3 if scaled else 2, num_barriers=tile.stages),
        plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    ]
    if scaled:
        scratch.append(plgpu.SMEM((tile.stages, _scale_rows(tile.rows)), F32))
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), BF16),
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("block",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        # The barriers above order all accesses; Mosaic's own would stall the producer.
        compiler_params=_PARAMS(unsafe_no_auto_barriers=True),
        interpret=interpreter() if interpret else False,
    )(*operands)
    return out[:live_m]


def _consumer_registers(warpgroups: int) -> int:
    return min(240, (512 - _PRODUCER_REGISTERS) // warpgroups // 8 * 8)


def _check(a, a_scales, b, b_scales, m_indices, alignment) -> None:
    if (a_scales is None) != (b_scales is None):
        raise ValueError("a_scales and b_scales must both be given (FP8) or both be None (bf16)")
    dtype = BF16 if a_scales is None else FP8
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
        raise ValueError(f"a is {a.shape} and b {b.shape}; they must be [M, K] and [E, N, K]")
    (m, k), (experts, n, _) = a.shape, b.shape
    if k == 0 or k % GROUP or n == 0 or n % GROUP or experts == 0:
        raise ValueError(
            f"E, N, K are {experts}, {n}, {k}; N and K must be positive multiples of {GROUP}"
        )
    _expect("a", a, dtype, (m, k))
    _expect("b", b, dtype, (experts, n, k))
    _expect("m_indices", m_indices, I32, (m,))
    if a_scales is not None:
        _expect("a_scales", a_scales, F32, (k // GROUP, pl.cdiv(m, 4) * 4))
        _expect("b_scales", b_scales, F32, (experts, n // GROUP, k // GROUP))
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment is {alignment}; it must be one of {ALIGNMENTS}")


def _expect(name: str, array: Array, dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {jnp.dtype(dtype).name}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
