"""Dispatch to expert rows: where each assignment goes, and the move itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import (
    BF16,
    F32,
    FP8,
    I32,
    LANES,
    WARPS,
    Registers,
    launch,
    pow2_floor,
    spread_rows,
    vector,
)

BOX = 256  # the most elements that one dimension of an asynchronous copy may have
ROW_BYTES = 16384  # of shared memory a block, so that many blocks share a multiprocessor

MOST_SCALED = 4096  # rows whose scales permute_rows moves with their values

BLOCK = 128  # assignments that a block of permute_index places, twice as many if there are many
SINGLE = 256  # up to here one block places all, in one launch
# Loads in flight, from shared and from global memory: one by one, each would be waited for.
UNROLL, FAR_UNROLL = 8, 32


def permute_index(
    topk_ids: Array, *, num_experts: int, alignment: int, rows: int, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """topk_ids [T, k] int32 -> src2dst [T, k], dst2src [rows] (a token), m_indices [rows], int32.

    Contiguous layout: experts in order, each in a segment that starts at a multiple of `alignment`
    (of 8), its rows in (token, slot) order, padding behind. -1: an id outside 0..E-1 has no row, a
    row of padding no token and no expert. The caller makes `rows` large enough.

    One launch for T * k <= 256. Else three: counts per block of assignments, their sums over
    earlier blocks, placement. Raises ValueError for arguments that do not fit.
    """
    if topk_ids.ndim != 2 or topk_ids.dtype != I32:
        raise ValueError(
            f"topk_ids is {topk_ids.dtype}{list(topk_ids.shape)}; it must be int32 [T, k]"
        )
    if alignment < 8 or alignment % 8 or rows % 8:
        raise ValueError(f"alignment={alignment}, rows={rows}; both must be multiples of 8")
    n = topk_ids.size
    if n == 0 or rows == 0:
        nothing = jnp.full(rows, -1, I32)
        return jnp.full(topk_ids.shape, -1, I32), nothing, nothing
    ids = topk_ids.reshape(n)
    size = BLOCK if n <= 65536 else 2 * BLOCK
    sums = () if n <= SINGLE else _sum_counts(ids, num_experts, size, interpret)
    src2dst, dst2src, m_indices = _place(
        ids,
        *sums,
        top_k=topk_ids.shape[1],
        num_experts=num_experts,
        alignment=alignment,
        rows=rows,
        size=-(-n // 128) * 128 if n <= SINGLE else size,
        interpret=interpret,
    )
    return src2dst.reshape(topk_ids.shape), dst2src, m_indices


def _whole_warpgroups(num_experts: int) -> int:
    return -(-num_experts // 128) * 128


def _unrolled(count: int, body: Callable, carry: object, by: int = UNROLL) -> object:
    """`carry = body(i, carry)` for each i = 0, by, 2 by, ... below count, a multiple of `by`."""
    return lax.fori_loop(0, count // by, lambda i, c: body(i * by, c), carry)


def _sum_counts(ids: Array, num_experts: int, size: int, interpret: bool) -> tuple[Array, Array]:
    """ids [n] -> before [blocks, lanes]: assignments to each expert in earlier blocks of `size`;
    total [lanes]. lanes: E in whole warpgroups. Blocks past the end fill up the warps of the sum:
    four warps sum a quarter of the blocks each, FAR_UNROLL at a time."""
    n, lanes = ids.shape[0], _whole_warpgroups(num_experts)
    regs = Registers(interpret)
    blocks = -(-n // (size * WARPS * FAR_UNROLL)) * WARPS * FAR_UNROLL
    steps = blocks // WARPS

    def count(ids_ref, counts_ref):
        first = lax.axis_index("b") * size
        by_expert = vector(lanes)
        expert = regs.iota((lanes,), 0, by_expert)

        def add(i, counts):
            index = [first + i * FAR_UNROLL + u for u in range(FAR_UNROLL)]
            found = [jnp.where(x < n, ids_ref[jnp.minimum(x, n - 1)], -1) for x in index]
            return _count(found, expert, counts)

        mine = jnp.minimum(jnp.maximum(n - first, 0), size)
        turns = lax.div(mine + (FAR_UNROLL - 1), FAR_UNROLL)
        counts = lax.fori_loop(0, turns, add, regs.full((lanes,), 0, by_expert))
        counts_ref[lax.axis_index("b"), :] = counts

    counts = launch(
        count,
        jax.ShapeDtypeStruct((blocks, lanes), I32),
        grid={"b": blocks},
        interpret=interpret,
        barriers=False,
    )(ids)

    shape, layout = (WARPS, LANES), spread_rows(WARPS, LANES, 1)

    def scan(counts_ref, before_ref, total_ref, quarters_ref):
        columns = pl.ds(lax.axis_index("e") * LANES, LANES)
        warp = regs.iota(shape, 0, layout)
        zeros = regs.full(shape, 0, layout)

        def load(i):
            return [regs.load(counts_ref.at[:, i + u, columns], layout) for u in range(FAR_UNROLL)]

        quarters_ref[...] = _unrolled(
            steps, lambda i, sums: functools.reduce(jnp.add, load(i), sums), zeros, FAR_UNROLL
        )
        plgpu.commit_smem()
        before, total = zeros, zeros
        for earlier in range(WARPS):
            part = regs.load(quarters_ref.at[earlier, :], layout.reduce(0))
            part = regs.cast(lax.broadcast_in_dim(part, shape, (1,)), layout)
            before, total = before + jnp.where(warp > earlier, part, 0), total + part
        total_ref[:, columns] = total

        def store(i, before):
            for u, counts in enumerate(load(i)):
                before_ref[:, i + u, columns] = before
                before = before + counts
            return before

        _unrolled(steps, store, before, FAR_UNROLL)

    before, total = launch(
        scan,
        (
            jax.ShapeDtypeStruct((WARPS, steps, lanes), I32),
            jax.ShapeDtypeStruct((WARPS, lanes), I32),
        ),
        grid={"e": lanes // LANES},
        scratch=(plgpu.SMEM(shape, I32),),
        interpret=interpret,
        barriers=False,
    )(counts.reshape(WARPS, steps, lanes))
    return before.reshape(blocks, lanes), total


def _count(ids: list[Array], expert: Array, counts: Array) -> Array:
    for found in ids:
        counts = counts + jnp.where(expert == found, 1, 0)
    return counts


def _place(
    ids: Array,
    *sums: Array,
    top_k: int,
    num_experts: int,
    alignment: int,
    rows: int,
    size: int,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """ids [n] and, unless one block does all, _sum_counts -> src2dst [n], dst2src, m_indices.
    A block places `size` ids; blocks past the end share the filling of padding."""
    n, lanes = ids.shape[0], _whole_warpgroups(num_experts)
    single = not sums
    blocks = 1 if single else sums[0].shape[0]
    regs = Registers(interpret)
    by_slot, by_expert = vector(size), vector(lanes)

    def kernel(ids_ref, *refs):
        *sums_refs, src2dst_ref, dst2src_ref, m_indices_ref, ids_smem, rows_smem, scan_smem = refs
        block = lax.axis_index("b")
        lane = regs.iota((size,), 0, by_slot)
        expert = regs.iota((lanes,), 0, by_expert)

        first = block * size

        def stage(start, length):
            there, here, layout = _piece(first, start, length)
            ids_smem[here] = regs.load(ids_ref.at[there], layout)

        ids_smem[...] = regs.full((size,), -1, by_slot)
        plgpu.commit_smem()
        _for_pieces(stage, block, single, n, size)
        plgpu.commit_smem()
        ids = regs.load(ids_smem, by_slot)
        ids = jnp.where(ids < num_experts, ids, -1)
        plgpu.commit_smem()
        ids_smem[...] = ids
        plgpu.commit_smem()

        if single:

            def add(i, total):
                return _count([ids_smem[i + u] for u in range(UNROLL)], expert, total)

            before, total = 0, _unrolled(size, add, regs.full((lanes,), 0, by_expert))
        else:
            before_ref, total_ref = sums_refs
            before = regs.load(before_ref.at[block, :], by_expert)
            total = regs.load(total_ref.at[0, :], by_expert)
        start = _exclusive_sum(_round_up(total, alignment), scan_smem, lanes, by_expert, regs)
        scan_smem[pl.ds(0, lanes)] = start + before
        scan_smem[pl.ds(lanes, lanes)] = start + total
        plgpu.commit_smem()

        def base(e, row):
            bases = [scan_smem[e + u] for u in range(UNROLL)]
            for u, value in enumerate(bases):
                row = jnp.where(ids != e + u, row, value)
            return row

        def rank(i, row):
            others = [ids_smem[i + u] for u in range(UNROLL)]
            for u, other in enumerate(others):
                row = row + jnp.where((ids == other) & (lane > i + u), 1, 0)
            return row

        row = _unrolled(-(-num_experts // UNROLL) * UNROLL, base, regs.full((size,), 0, by_slot))
        rows_smem[...] = jnp.where(ids >= 0, _unrolled(size, rank, row), -1)
        out_refs = (dst2src_ref, m_indices_ref)
        if single:
            _fill_all(out_refs, rows, regs)
        else:
            ends = [scan_smem, lanes]
            _fill_padding(out_refs, block, blocks, ends, num_experts, alignment, rows, regs)
        plgpu.commit_smem()

        def store(start, length):
            there, here, layout = _piece(first, start, length)
            src2dst_ref[there] = regs.load(rows_smem.at[here], layout)

        _for_pieces(store, block, single, n, size)

        def scatter(i, carry):
            placed = [(rows_smem[i + u], ids_smem[i + u]) for u in range(UNROLL)]
            for u, (row, expert) in enumerate(placed):

                @pl.when(row >= 0)
                def _(row=row, expert=expert, assignment=first + i + u):
                    dst2src_ref[row] = lax.div(assignment, top_k)
                    m_indices_ref[row] = expert

            return carry

        _unrolled(-(-min(n, size) // UNROLL) * UNROLL, scatter, 0)

    row_type = jax.ShapeDtypeStruct((rows,), I32)
    return launch(
        kernel,
        (jax.ShapeDtypeStruct((n,), I32), row_type, row_type),
        grid={"b": blocks},
        scratch=(
            plgpu.SMEM((size,), I32),
            plgpu.SMEM((size,), I32),
            plgpu.SMEM((2 * lanes,), I32),
        ),
        interpret=interpret,
        barriers=False,
    )(ids, *sums)


def _round_up(x: Array, multiple: int) -> Array:
    multiple = jnp.full_like(x, multiple)
    return lax.div(x + (multiple - 1), multiple) * multiple


def _piece(first: Array, start: int, length: int) -> tuple:
    """Where [start, start + length) of a block lies in global and in shared memory, its layout."""
    if length == 1:
        return first + start, start, None
    return pl.ds(first + start, length), pl.ds(start, length), vector(length)


def _for_pieces(move: Callable, block: Array, single: bool, n: int, size: int) -> None:
    """move(start, length) for pieces that cover this block's share of n: `size`, in the last block
    the rest, as two powers of two that may overlap, and then nothing."""
    last = -(-n // size) - 1

    def rest():
        count = n - last * size
        part = count if count == size else pow2_floor(count)
        for start in sorted({0, count - part}):
            move(start, part)

    if single:
        rest()
    else:
        pl.when(block == last)(rest)
        pl.when(block < last)(lambda: move(0, size))


def _exclusive_sum(x: Array, smem, lanes: int, layout, regs: Registers) -> Array:
    """x [lanes] -> sums of the elements before each; smem [2 * lanes] holds zeros, then x."""
    smem[pl.ds(0, lanes)] = regs.full((lanes,), 0, layout)
    total, distance = x, 1
    while distance < lanes:
        smem[pl.ds(lanes, lanes)] = total
        plgpu.commit_smem()
        total = total + regs.load(smem.at[pl.ds(lanes - distance, lanes)], layout)
        plgpu.commit_smem()
        distance *= 2
    return total - x


def _fill_all(refs: tuple, rows: int, regs: Registers) -> None:
    width = min(512, pow2_floor(rows))
    nothing = regs.full((width,), -1, vector(width, 4))

    def fill(i, carry):
        for ref in refs:
            ref[pl.ds(jnp.minimum(i * width, rows - width), width)] = nothing
        return carry

    lax.fori_loop(0, -(-rows // width), fill, 0)


def _fill_padding(
    refs: tuple,
    block: Array,
    blocks: int,
    ends: list,
    num_experts: int,
    alignment: int,
    rows: int,
    regs: Registers,
) -> None:
    """-1 in the padding of every `blocks`-th segment and in this block's share of what follows the
    last one. `ends`: shared memory, and where in it the ends of the experts' live rows begin."""
    eight = regs.full((8,), -1, vector(8))
    many = regs.full((128,), -1, vector(128))

    def fill(first, count, stride, width, value):
        def body(i, carry):
            for ref in refs:
                ref[pl.ds(first + i * stride * width, width)] = value
            return carry

        lax.fori_loop(0, count, body, 0)

    def segment(i, carry):
        expert = block + i * blocks

        @pl.when(expert < num_experts)
        def _():
            live = ends[0][ends[1] + expert]
            aligned = _round_up(live, 8)

            def one(row, carry):
                for ref in refs:
                    ref[row] = jnp.int32(-1)
                return carry

            lax.fori_loop(live, aligned, one, 0)
            fill(aligned, lax.div(_round_up(live, alignment) - aligned, 8), 1, 8, eight)

        return carry

    lax.fori_loop(0, -(-num_experts // blocks), segment, 0)
    used = _round_up(ends[0][ends[1] + num_experts - 1], alignment)
    for width, value in ((128, many), (8, eight)):
        count = lax.div(rows - used, width)
        # This block's share: every `blocks`-th piece, from its own number on.
        share = lax.div(jnp.maximum(count - block + (blocks - 1), 0), blocks)
        fill(used + block * width, share, blocks, width, value)
        used = used + count * width


def permute_rows(
    values: Array,
    scales: Array | None,
    src2dst: Array,
    dst2src: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """values [T, K] bf16 or float8_e4m3fn, scales [G, Ts] f32 (Ts >= T) or None, src2dst [T, k],
    dst2src [rows] int32 -> values [rows, K], scales [G, rows]: row src2dst[t, j] is token t's.

    Each token is read once and written k times; the scales of many rows are gathered apart. Rows
    that src2dst does not name are not written. K is a multiple of 128.

    Raises ValueError for shapes or dtypes that do not fit.
    """
    t, width = values.shape
    k, rows = src2dst.shape[1], dst2src.shape[0]
    if values.dtype not in (BF16, FP8) or width % 128:
        raise ValueError(
            f"values is {values.dtype}{list(values.shape)}; it must be bf16 or float8_e4m3fn "
            "[T, K], K % 128 == 0"
        )
    if src2dst.shape[0] != t or src2dst.dtype != I32:
        raise ValueError(
            f"src2dst is {src2dst.dtype}{list(src2dst.shape)}; it must be int32 [{t}, k]"
        )
    if scales is not None and (scales.dtype != F32 or scales.shape[1] < t):
        raise ValueError(
            f"scales is {scales.dtype}{list(scales.shape)}; it must be f32 [G, Ts], Ts >= {t}"
        )
    out_type = (jax.ShapeDtypeStruct((rows, width), values.dtype),)
    if scales is not None:
        out_type += (jax.ShapeDtypeStruct((scales.shape[0], rows), F32),)
    if t == 0 or rows == 0:
        out = tuple(jnp.zeros(o.shape, o.dtype) for o in out_type)
        return out[0], out[1] if scales is not None else None

    if scales is not None and t * k > MOST_SCALED:
        # Four bytes here and there for each row and group cost more than the row itself.
        moved, _ = permute_rows(values, None, src2dst, dst2src, interpret=interpret)
        return moved, jnp.take(scales, dst2src, axis=1, mode="clip")

    regs = Registers(interpret)
    box = BOX if width % BOX == 0 else 128
    boxes = width // box
    # The largest divisor of a row that fits: every column block is then alike.
    limit = min(BOX, ROW_BYTES // (box * values.dtype.itemsize))
    step = max(d for d in range(1, boxes + 1) if boxes % d == 0 and d <= limit)
    groups = 0 if scales is None else scales.shape[0]
    chunk = min(32, pow2_floor(groups)) if groups else 0

    def kernel(*refs):
        values_ref, src2dst_ref, *refs = refs
        if groups:
            scales_ref, out_ref, scales_out_ref, row_ref, arrived = refs
        else:
            out_ref, row_ref, arrived = refs
        token, column = lax.axis_index("t"), lax.axis_index("c")
        boxed = pl.ds(column * step, step)
        plgpu.copy_gmem_to_smem(values_ref.at[token, boxed, :], row_ref, arrived)
        dst = [src2dst_ref[token, j] for j in range(k)]
        if groups:

            @pl.when(column == 0)
            def _():
                for start in range(0, groups, chunk):
                    part = pl.ds(min(start, groups - chunk), chunk)
                    _copy_scales(scales_ref, scales_out_ref, part, chunk, token, dst, regs)

        plgpu.barrier_wait(arrived)
        for d in dst:

            @pl.when(d >= 0)
            def _(d=d):
                plgpu.copy_smem_to_gmem(row_ref, out_ref.at[d, boxed, :])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out_type = (jax.ShapeDtypeStruct((rows, boxes, box), values.dtype), *out_type[1:])
    out = launch(
        kernel,
        out_type,
        grid={"t": t, "c": boxes // step},
        scratch=(plgpu.SMEM((step, box), values.dtype), plgpu.Barrier()),
        interpret=interpret,
        barriers=False,
    )(values.reshape(t, boxes, box), src2dst, *(() if scales is None else (scales,)))
    return out[0].reshape(rows, width), out[1] if groups else None


def _copy_scales(scales_ref, out_ref, part, chunk: int, token: Array, dst: list, regs) -> None:
    """Column `token` of the scales to each of its rows' columns."""
    if chunk == 1:
        column = scales_ref[part.start, token]
    else:
        column = regs.load(scales_ref.at[part, token], vector(chunk))
    for d in dst:

        @pl.when(d >= 0)
        def _(d=d):
            out_ref[part.start if chunk == 1 else part, d] = column
