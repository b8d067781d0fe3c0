"""Dispatch to expert rows: where each assignment goes."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import I32, Registers, for_pieces, launch, own_index, piece, pow2_floor, vector

FEW = 256  # assignments up to which one launch does all: every block ranks them all
CHUNK = 128  # of more: those that are ranked against each other,
BLOCKS = 128  # blocks that count them,
SPLIT = 2  # and blocks that place what one of those counted
MOST_CHUNKS = 32  # of a block, which fit in its shared memory
# Loads in flight, from shared and from global memory: one by one, each would be waited for.
UNROLL, FAR_UNROLL = 32, 64


def permute_index(
    topk_ids: Array,
    *,
    num_experts: int,
    rows: int,
    alignment: int,
    capacity: int | None,
    tile: int,
    with_m_indices: bool,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None, Array]:
    """topk_ids [T, k] -> src2dst [T, k], tiles [3, N], m_indices [rows] or None, masked_m [E].

    All int32. An expert's rows are dense, in (token, slot) order. `capacity` None: contiguous,
    experts one after another, each at a multiple of `alignment`; else expert e's rows start at
    e * capacity. src2dst is -1 for an id outside 0..E-1 and for what does not fit in `capacity`.

    tiles: expert (-1: no tile), first row, number of live rows (0: no tile); at most `tile` rows of
    one expert, live tiles first, in expert order. N = num_tiles(T * k, E, tile). m_indices
    (contiguous only): the expert of a live row, -1 elsewhere. masked_m: rows of each expert.

    One launch for T * k <= 256, else two: blocks count their assignments; then each sums what
    earlier ones counted and places its own. Raises ValueError for arguments that do not fit.
    """
    if topk_ids.ndim != 2 or topk_ids.dtype != I32:
        raise ValueError(
            f"topk_ids is {topk_ids.dtype}{list(topk_ids.shape)}; it must be int32 [T, k]"
        )
    if alignment < 8 or alignment % 8 or tile < 8 or tile % alignment:
        raise ValueError(
            f"alignment={alignment}, tile={tile}; they must be multiples of 8, tile of alignment"
        )
    if capacity is not None and (capacity % alignment or rows != num_experts * capacity):
        raise ValueError(
            f"capacity={capacity}, rows={rows}; they must be a multiple of alignment={alignment} "
            f"and num_experts={num_experts} times that"
        )
    if with_m_indices and (capacity is not None or rows % alignment):
        raise ValueError(
            f"m_indices needs the contiguous layout and rows={rows} a multiple of "
            f"alignment={alignment}"
        )
    n = topk_ids.size
    if n == 0 or rows == 0:
        return (
            jnp.full(topk_ids.shape, -1, I32),
            jnp.broadcast_to(
                jnp.array([[-1], [0], [0]], I32), (3, num_tiles(n, num_experts, tile))
            ),
            jnp.full(rows, -1, I32) if with_m_indices else None,
            jnp.zeros(num_experts, I32),
        )
    ids = topk_ids.reshape(n)
    place = _place_few if n <= FEW else _place_many
    src2dst, tiles, masked_m, *m_indices = place(
        ids, num_experts, rows, alignment, capacity, tile, with_m_indices, interpret
    )
    return (
        src2dst.reshape(topk_ids.shape),
        tiles,
        m_indices[0] if with_m_indices else None,
        masked_m,
    )


def num_tiles(num_assignments: int, num_experts: int, tile: int) -> int:
    """Tiles that no routing can exceed: as many experts as possible have a single row."""
    nonempty = min(num_assignments, num_experts)
    return nonempty + (num_assignments - nonempty) // tile


def _lanes(num_experts: int) -> int:
    return pl.cdiv(num_experts, 128) * 128


def _for_each(count: int, load: Callable, use: Callable, carry: object) -> object:
    """carry = use(i, load(i), carry) for each i below count, and some beyond; loads go first."""
    step = min(UNROLL, count)

    def several(turn, carry):
        index = [turn * step + u for u in range(step)]
        for i, loaded in zip(index, [load(i) for i in index], strict=True):
            carry = use(i, loaded, carry)
        return carry

    return lax.fori_loop(0, pl.cdiv(count, step), several, carry)


def _count(ids_smem, first: Array | int, count: int, expert: Array, counts: Array) -> Array:
    """counts + how often each `expert` is among `count` ids."""

    def add(i, found, counts):
        return counts + jnp.where(expert == found, 1, 0)

    return _for_each(count, lambda i: ids_smem[first + i], add, counts)


def _stage(ids_ref, ids_smem, block: Array, n: int, size: int, num_experts: int, regs) -> None:
    """A block's `size` ids into shared memory; -1 for those that no expert has or that do not
    exist."""
    ids_smem[...] = regs.full((size,), -1, vector(size))
    plgpu.commit_smem()

    def move(start, length):
        there, here, layout = piece(block * size, start, length)
        ids = regs.load(ids_ref.at[there], layout)
        ids_smem[here] = jnp.where(ids < num_experts, ids, -1)

    for_pieces(move, block, n, size)
    plgpu.commit_smem()


def _out_types(n: int, tiles: int, num_experts: int, rows: int, with_m_indices: bool) -> tuple:
    shapes = [(n,), (3, tiles), (num_experts,)] + [(rows,)] * with_m_indices
    return tuple(jax.ShapeDtypeStruct(shape, I32) for shape in shapes)


def _place_few(
    ids: Array,
    num_experts: int,
    rows: int,
    alignment: int,
    capacity: int | None,
    tile: int,
    with_m_indices: bool,
    interpret: bool,
) -> tuple[Array, ...]:
    """ids [n] -> src2dst [n], tiles, masked_m and, if asked for, m_indices.

    Assignments in lanes, each compared with all. The first block writes all but the tiles.
    """
    n, lanes, most_tiles = ids.shape[0], _lanes(num_experts), num_tiles(ids.size, num_experts, tile)
    size, width = _lanes(n), 128
    regs = Registers(interpret)
    by_slot, by_expert, by_tile = vector(size), vector(lanes), vector(width)

    def place_all(ids_ref, src2dst_ref, tiles_ref, masked_m_ref, *refs):
        *m_indices_ref, ids_smem, opens_smem, rows_smem, tile_smem, out_smem = refs
        part = own_index("b") - 1
        none = regs.full((size,), 0, by_slot)
        _stage(ids_ref, ids_smem, 0, n, size, num_experts, regs)
        mine = regs.load(ids_smem, by_slot)
        rank = _rank(mine, ids_smem, 0, n, by_slot, regs)
        real = mine >= 0 if capacity is None else (mine >= 0) & (rank < capacity)
        # Every `alignment` assignments to an expert take that many more rows before later experts,
        # every `tile` one more tile. Both are counted at once, tiles from bit 16 on.
        opens = jnp.where(_rem(rank, alignment) == 0, 1, 0)
        opens = opens + jnp.where(_rem(rank, tile) == 0, 1 << 16, 0)
        opens_smem[...] = jnp.where(real, opens, 0)
        plgpu.commit_smem()

        def add(i, loaded, opened):
            other, opens = loaded
            return opened + jnp.where(mine > other, opens, 0)

        opened = _for_each(n, lambda i: (ids_smem[i], opens_smem[i]), add, none)
        start = (opened & 0xFFFF) * alignment if capacity is None else mine * capacity
        rows_smem[...] = jnp.where(real, start + rank, -1)
        tile_smem[...] = jnp.where(real, (opened >> 16) + _div(rank, tile), -1)
        plgpu.commit_smem()

        @pl.when(part < 0)
        def _():
            def store(start, length):
                there, here, layout = piece(0, start, length)
                src2dst_ref[there] = regs.load(rows_smem.at[here], layout)

            for_pieces(store, 0, n, size)
            expert = regs.iota((lanes,), 0, by_expert)
            counts = _count(ids_smem, 0, n, expert, regs.full((lanes,), 0, by_expert))
            _store_masked_m(masked_m_ref, counts, capacity, num_experts, out_smem, regs)
            if with_m_indices:
                _write_all_m_indices(m_indices_ref[0], rows_smem, ids_smem, n, rows, regs)

        @pl.when(part >= 0)
        def _():
            index = part * width + regs.iota((width,), 0, by_tile)

            def look(i, loaded, found):
                (its_tile, its_expert, its_row), (expert, last, live) = loaded, found
                other = index != its_tile
                expert, last = jnp.where(other, expert, its_expert), jnp.where(other, last, its_row)
                return expert, last, jnp.where(other, live, live + 1)

            zero = regs.full((width,), 0, by_tile)
            smems = tile_smem, ids_smem, rows_smem
            expert, last, live = _for_each(
                n, lambda i: [smem[i] for smem in smems], look, (zero - 1, zero, zero)
            )
            row = jnp.where(live > 0, last + 1 - live, 0)
            _store_tiles(tiles_ref, (expert, row, live), out_smem, part, width, most_tiles, regs)

    smem = [size, size, size, size, max(lanes, 3 * width)]
    return launch(
        place_all,
        _out_types(n, most_tiles, num_experts, rows, with_m_indices),
        grid={"b": 1 + pl.cdiv(most_tiles, width)},
        scratch=tuple(plgpu.SMEM((length,), I32) for length in smem),
        interpret=interpret,
        barriers=False,
    )(ids)


def _store_masked_m(ref, counts: Array, capacity: int | None, num_experts: int, smem, regs) -> None:
    """The first E of counts [lanes], clipped to `capacity`."""
    (lanes,) = counts.shape
    smem[pl.ds(0, lanes)] = counts if capacity is None else jnp.minimum(counts, capacity)
    plgpu.commit_smem()

    def store(start, length):
        there, here, layout = piece(0, start, length)
        ref[there] = regs.load(smem.at[here], layout)

    for_pieces(store, 0, num_experts, lanes)


def _store_tiles(ref, columns: tuple, smem, part: Array, share: int, count: int, regs) -> None:
    """Part number `part` of the tiles, `share` of them; columns [width] of expert, row, live."""
    (width,) = columns[0].shape
    plgpu.commit_smem()  # Until here, others may still read what it held.
    for i, column in enumerate(columns):
        smem[pl.ds(i * width, width)] = column
    plgpu.commit_smem()

    def store(start, length):
        there, _, layout = piece(part * share, start, length)
        for i in range(3):
            here = piece(i * width, start, length)[0]
            ref[i, there] = regs.load(smem.at[here], layout)

    for_pieces(store, part, count, share)


def _write_all_m_indices(ref, rows_smem, ids_smem, n: int, rows: int, regs: Registers) -> None:
    """-1 everywhere, then each assignment's expert at its row."""
    width = min(512, pow2_floor(rows))
    nothing = regs.full((width,), -1, vector(width, 4))

    def fill(i, carry):
        ref[pl.ds(jnp.minimum(i * width, rows - width), width)] = nothing
        return carry

    lax.fori_loop(0, pl.cdiv(rows, width), fill, 0)
    plgpu.commit_smem()

    def scatter(i, loaded, carry):
        row, expert = loaded

        @pl.when(row >= 0)
        def _():
            ref[row] = expert

        return carry

    _for_each(n, lambda i: (rows_smem[i], ids_smem[i]), scatter, 0)


def _place_many(
    ids: Array,
    num_experts: int,
    rows: int,
    alignment: int,
    capacity: int | None,
    tile: int,
    with_m_indices: bool,
    interpret: bool,
) -> tuple[Array, ...]:
    """`_place_few` for any number. A block ranks its ids chunk by chunk, and looks up where each
    expert's rows have come to in a table."""
    n, lanes, most_tiles = ids.shape[0], _lanes(num_experts), num_tiles(ids.size, num_experts, tile)
    counted = min(MOST_CHUNKS, pl.cdiv(pl.cdiv(n, CHUNK * BLOCKS), SPLIT) * SPLIT)
    counts = _count_in_blocks(ids, num_experts, counted, interpret)
    chunks = counted // SPLIT
    size = chunks * CHUNK
    # Tiles that a block lists at a time, a power of two; blocks past the ids list more of them.
    blocks = max(pl.cdiv(n, size), min(BLOCKS, pl.cdiv(most_tiles, 16)))
    share = min(128, 2 * pow2_floor(max(8, pl.cdiv(most_tiles, blocks) - 1)))
    regs = Registers(interpret)
    by_slot, by_expert, by_tile = vector(CHUNK), vector(lanes), vector(128)

    def place(ids_ref, counts_ref, src2dst_ref, tiles_ref, masked_m_ref, *refs):
        *m_indices_ref, ids_smem, rows_smem, sums_smem, table_smem, out_smem = refs
        block = own_index("b")
        counter = jnp.minimum(lax.div(block, SPLIT), counts.shape[0] - 1)
        first_chunk = lax.rem(block, SPLIT) * chunks
        none = regs.full((lanes,), 0, by_expert)
        _stage(ids_ref, ids_smem, block, n, size, num_experts, regs)

        def load_within(c):
            return regs.load(counts_ref.at[counter, first_chunk + c, :], by_expert)

        within = load_within(0)
        before, total = _sum(counts_ref, counter, counted, none, by_expert, regs)
        if capacity is None:
            sums = _round_up(total, alignment), _cdiv(total, tile)
            start, first_tile = _exclusive_sums(sums, sums_smem, by_expert, regs)
        else:
            start = regs.iota((lanes,), 0, by_expert) * capacity
            held = jnp.minimum(total, capacity)
            (first_tile,) = _exclusive_sums((_cdiv(held, tile),), sums_smem, by_expert, regs)
            total = held
        # Tile j of an expert starts at row `shift + j * tile`.
        for i, column in enumerate((first_tile, start - first_tile * tile, start + total)):
            table_smem[pl.ds((1 + i) * lanes, lanes)] = column
        base = start + before

        def place_chunk(c, within):
            following = load_within(jnp.minimum(c + 1, chunks - 1))
            plgpu.commit_smem()  # Until here, others may still read the rows of the last chunk.
            table_smem[pl.ds(0, lanes)] = base + within
            plgpu.commit_smem()
            here = pl.ds(c * CHUNK, CHUNK)
            mine = regs.load(ids_smem.at[here], by_slot)
            row = _look_up(mine, table_smem, num_experts, by_slot, regs)
            row = row + _rank(mine, ids_smem, c * CHUNK, CHUNK, by_slot, regs)
            real = mine >= 0
            if capacity is not None:
                real = real & (row < (mine + 1) * capacity)
            rows_smem[here] = jnp.where(real, row, -1)
            return following

        lax.fori_loop(0, chunks, place_chunk, within)
        plgpu.commit_smem()

        def store(start, length):
            there, here, layout = piece(block * size, start, length)
            src2dst_ref[there] = regs.load(rows_smem.at[here], layout)

        for_pieces(store, block, n, size)
        pl.when(block == 0)(
            lambda: _store_masked_m(masked_m_ref, total, capacity, num_experts, out_smem, regs)
        )

        def list_tiles(i, carry):
            part = block + i * blocks
            index = part * share + regs.iota((128,), 0, by_tile)
            found = _tiles_at(index, table_smem, num_experts, lanes, tile, by_tile, regs)
            _store_tiles(tiles_ref, found, out_smem, part, share, most_tiles, regs)
            if with_m_indices:
                _write_m_indices(m_indices_ref[0], out_smem, 128, share, alignment, regs)
            return carry

        lax.fori_loop(0, pl.cdiv(pl.cdiv(most_tiles, share), blocks), list_tiles, 0)
        if with_m_indices:
            used = _round_up(table_smem[3 * lanes + num_experts - 1], alignment)
            _fill_rest(m_indices_ref[0], used, rows, block, blocks, alignment, regs)

    smem = [size, size, 8 * lanes, 4 * lanes, max(lanes, 3 * 128)]
    return launch(
        place,
        _out_types(n, most_tiles, num_experts, rows, with_m_indices),
        grid={"b": blocks},
        scratch=tuple(plgpu.SMEM((length,), I32) for length in smem),
        interpret=interpret,
        barriers=False,
    )(ids, counts)


def _count_in_blocks(ids: Array, num_experts: int, chunks: int, interpret: bool) -> Array:
    """ids [n] -> [blocks, chunks + 1, lanes]: how often a block's ids before each of its chunks
    name each expert; in the end, all of them. Blocks past the end fill up the steps of `_sum`."""
    n, lanes, size = ids.shape[0], _lanes(num_experts), chunks * CHUNK
    far = _far(lanes)
    blocks = pl.cdiv(pl.cdiv(n, size), far) * far
    regs = Registers(interpret)

    def count(ids_ref, counts_ref, ids_smem):
        block, by_expert = own_index("b"), vector(lanes)
        expert = regs.iota((lanes,), 0, by_expert)
        _stage(ids_ref, ids_smem, block, n, size, num_experts, regs)

        def chunk(c, counts):
            counts_ref[block, c, :] = counts
            return _count(ids_smem, c * CHUNK, CHUNK, expert, counts)

        counts = lax.fori_loop(0, chunks, chunk, regs.full((lanes,), 0, by_expert))
        counts_ref[block, chunks, :] = counts

    return launch(
        count,
        jax.ShapeDtypeStruct((blocks, chunks + 1, lanes), I32),
        grid={"b": blocks},
        scratch=(plgpu.SMEM((size,), I32),),
        interpret=interpret,
        barriers=False,
    )(ids)


def _far(lanes: int) -> int:
    """Loads in flight, so that they fit in registers."""
    return max(1, FAR_UNROLL * 128 // lanes)


def _sum(counts_ref, block: Array, chunks: int, none: Array, layout, regs) -> tuple[Array, Array]:
    """Counts of the blocks before `block`, and of all."""
    far = _far(none.shape[0])

    def add(i, sums):
        before, total = sums
        loaded = [regs.load(counts_ref.at[i * far + u, chunks, :], layout) for u in range(far)]
        for u, counts in enumerate(loaded):
            before = before + jnp.where(i * far + u < block, counts, 0)
            total = total + counts
        return before, total

    return lax.fori_loop(0, counts_ref.shape[0] // far, add, (none, none))


def _look_up(ids: Array, table_smem, num_experts: int, layout, regs: Registers) -> Array:
    """table[ids], by way of all entries: no instruction gathers. (Mosaic takes the sign of a
    select from its first value, which a scalar lacks.)"""

    def look(e, entry, row):
        return jnp.where(ids != e, row, entry)

    zero = regs.full(ids.shape, 0, layout)
    return _for_each(num_experts, lambda e: table_smem[e], look, zero)


def _rank(ids: Array, ids_smem, first: Array | int, count: int, layout, regs: Registers) -> Array:
    """How many of the `count` ids from `first` on are equal and earlier."""
    lane = regs.iota(ids.shape, 0, layout)

    def add(i, other, rank):
        return rank + jnp.where((ids == other) & (lane > i), 1, 0)

    zero = regs.full(ids.shape, 0, layout)
    return _for_each(count, lambda i: ids_smem[first + i], add, zero)


def _tiles_at(index: Array, table_smem, num_experts: int, lanes: int, tile: int, layout, regs):
    """Expert, first row and live rows of tile number `index`: the last expert whose tiles start
    there or before has it, or it is past the end."""

    def look(e, loaded, found):
        first_tile, *entries = loaded
        pairs = zip(found, (e, *entries), strict=True)
        return tuple(jnp.where(index < first_tile, x, y) for x, y in pairs)

    zeros = (regs.full(index.shape, 0, layout),) * 3
    columns = [lanes, 2 * lanes, 3 * lanes]
    expert, shift, end = _for_each(
        num_experts, lambda e: [table_smem[column + e] for column in columns], look, zeros
    )
    row = shift + index * tile
    live = jnp.minimum(end - row, tile)
    return jnp.where(live > 0, expert, -1), jnp.where(live > 0, row, 0), jnp.maximum(live, 0)


def _write_m_indices(m_indices_ref, tiles_smem, width: int, share: int, alignment: int, regs):
    """Experts of the rows of `share` tiles, -1 up to the next multiple of `alignment`."""
    step = math.gcd(alignment, 128)
    lane = regs.iota((step,), 0, vector(step))

    def one(j, loaded, carry):
        expert, row, live = loaded

        def step_of(i, carry):
            values = jnp.where(lane < live - i * step, expert, -1)
            m_indices_ref[pl.ds(row + i * step, step)] = values
            return carry

        return lax.fori_loop(0, lax.div(_round_up(live, alignment), step), step_of, carry)

    _for_each(share, lambda j: [tiles_smem[i * width + j] for i in range(3)], one, 0)


def _fill_rest(m_indices_ref, used: Array, rows: int, block: Array, blocks: int, alignment, regs):
    """-1 in this block's share of the rows from `used` on: every `blocks`-th piece."""
    step = math.gcd(alignment, 128)
    nothing = regs.full((step,), -1, vector(step))

    def fill(i, carry):
        m_indices_ref[pl.ds(used + (block + i * blocks) * step, step)] = nothing
        return carry

    pieces = lax.div(rows - used, step)
    lax.fori_loop(0, lax.div(jnp.maximum(pieces - block + (blocks - 1), 0), blocks), fill, 0)


def _div(x: Array, by: int) -> Array:
    return lax.div(x, jnp.full_like(x, by))


def _rem(x: Array, by: int) -> Array:
    return lax.rem(x, jnp.full_like(x, by))


def _cdiv(x: Array, by: int) -> Array:
    return _div(x + (by - 1), by)


def _round_up(x: Array, multiple: int) -> Array:
    return _cdiv(x, multiple) * multiple


def _exclusive_sums(vectors: tuple[Array, ...], smem, layout, regs: Registers) -> list[Array]:
    """Of each vector [lanes], the sums of the elements before each; smem [8 * lanes]: for each of
    two vectors, zeros before its elements, twice, so that a step needs one barrier."""
    (lanes,) = vectors[0].shape
    starts = range(0, 2 * lanes * len(vectors), 2 * lanes)
    zeros = regs.full((lanes,), 0, layout)
    for start in (*starts, *(4 * lanes + s for s in starts)):
        smem[pl.ds(start, lanes)] = zeros
    totals, distance, offset = vectors, 1, 0
    while distance < lanes:
        for start, total in zip(starts, totals, strict=True):
            smem[pl.ds(offset + start + lanes, lanes)] = total
        plgpu.commit_smem()
        totals = [
            total + regs.load(smem.at[pl.ds(offset + start + lanes - distance, lanes)], layout)
            for start, total in zip(starts, totals, strict=True)
        ]
        distance, offset = 2 * distance, 4 * lanes - offset
    return [total - x for total, x in zip(totals, vectors, strict=True)]
