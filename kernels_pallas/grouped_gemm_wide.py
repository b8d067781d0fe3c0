"""Grouped GEMM for many rows an expert: tiles of 128 rows x 256 columns, tokens on WGMMA's M side.

D = x W^T, the other way round than in `grouped_gemm`: each of two warpgroups has 64 rows of the
tile and all of its columns. A thread then holds two rows of two 128-column blocks: the scales of a
K block are four numbers to it, and a row's 128 columns lie in one warpgroup, whose threads alone
activate and quantise them. The sums are those of `grouped_gemm`, bit for bit: the same K blocks in
the same order, each times the product of both scales, added in f32.

A cluster of two blocks does two tiles' worth of work a turn and loads what both need once: the
weights, which are the larger operand, where tiles 2i and 2i + 1 have the same expert and more than
64 rows, and each block takes one of them; otherwise the tokens, where the blocks take neighbouring
columns of one tile.

On an H200 (E 256, H 7168, I 2048, FP8) w13 and w2 took 11.9 ms at 512 rows an expert, 13.5 by
`grouped_gemm` and 10.2 by DeepGEMM's masked GEMMs; at 128 rows 3.96, 4.10 and 3.64; at 64 rows
3.07, 3.13 and 3.14. Tried there and slower: only tokens shared (4 to 10 %), and the two
warpgroups' products by turns, as FlashAttention-3 has them (2 to 6 %).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import (
    _PARAMS,
    BF16,
    F32,
    FP8,
    I32,
    Registers,
    as_bf16,
    interpreter,
    own,
    own_index,
    vector,
)
from .grouped_gemm import (
    _REGISTERS,
    _ROW_BYTES,
    _SMS,
    _WARPGROUPS,
    _WGMMA_ROWS,
    Fused,
    _freed,
    _operands,
    _outputs,
    _swizzled,
    output_types,
)
from .quant import GROUP, quantize_tile

ROWS, COLUMNS = 128, 2 * GROUP  # of a tile
_CHUNK = 64  # columns of an output that are laid out in shared memory at a time


class Config(NamedTuple):
    stages: int = 4  # K blocks in flight
    cluster: int = 2


def choose_config(n: int) -> Config:
    return Config(cluster=2 if n // COLUMNS % 2 == 0 else 1)


@functools.partial(
    jax.jit,
    static_argnames=("alignment", "slabs", "config", "fused", "interpret"),
    inline=True,
)
def grouped(
    a: Array,
    a_scales: Array | None,
    b: Array,
    b_scales: Array | None,
    tiles: Array,
    *,
    alignment: int,
    slabs: int,
    config: Config,
    fused: Fused | None = None,
    interpret: bool,
) -> tuple[Array, ...]:
    """`grouped_gemm.grouped` for tiles of at most 128 rows, N % 256 == 0."""
    (m, k), n = a.shape, b.shape[1]
    out_columns = n // 2 if fused else n
    quantized = fused is not None and fused.quantized
    out_types = output_types(m, out_columns, slabs, fused)
    if m == 0 or tiles.shape[1] == 0:
        return _outputs([jnp.zeros(t.shape, t.dtype) for t in out_types], m, out_columns)
    scaled = a_scales is not None
    operands = _operands(a, a_scales, b, b_scales, tiles, ROWS, interpret)

    depth, slab_rows = _ROW_BYTES // a.dtype.itemsize, m // slabs
    k_steps, cluster = k // depth, config.cluster
    units = n // (COLUMNS * cluster)  # of work of a tile
    clusters = min(_SMS // cluster, tiles.shape[1] * units)
    regs = Registers(interpret)
    accumulator, token_vector = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    piece = min(alignment, _WGMMA_ROWS)

    def wide_gemm(*refs):
        a_ref, b_ref, tiles_ref, *scale_refs = refs[: len(operands)]
        out_refs, scratch = refs[len(operands) :][: len(out_types)], refs[-len(scratch_types) :]
        a_smem, b_smem, out_smem, full, full_other, empty, *more = scratch
        warpgroup = own_index("warpgroup")
        if scaled:
            (a_scales_ref, b_scales_ref), a_scales_smem = scale_refs, more[0]
        if interpret:  # No clusters there: blocks side by side do what a cluster's would.
            cluster_index = lax.div(own_index("cluster"), cluster)
            peer = lax.rem(own_index("cluster"), cluster)
        else:
            cluster_index, peer = own_index("cluster"), own_index("peer")

        def look(turn):
            """(expert, first row, live rows, column, paired) of this block's work number `turn`.

            A cluster has units 0 .. units - 1 of each tile. Two tiles of a pair have twice that
            together, one for each column; a tile of its own has one for each two columns.
            """
            index = cluster_index + turn * clusters
            t, unit = lax.div(index, units), lax.rem(index, units)
            inside = t < tiles.shape[1]
            t = jnp.minimum(t, tiles.shape[1] - 1)
            expert, row, live = (tiles_ref[i, t] for i in range(3))
            expert = jnp.where(inside, expert, -1)
            column, paired = unit * cluster + peer, jnp.bool_(False)
            if cluster > 1:
                odd = lax.rem(t, 2)
                other = t + 1 - 2 * odd
                there = jnp.minimum(other, tiles.shape[1] - 1)
                # Read whether they are wanted or not: no read then waits for another.
                other_expert, other_row, other_live = (tiles_ref[i, there] for i in range(3))
                # A block with 64 rows or fewer would wait for one with more at every K step.
                many = jnp.minimum(live, other_live) > _WGMMA_ROWS
                paired = (there == other) & (other_expert == expert) & many
                mine = ~paired | (odd == peer)
                row, live = jnp.where(mine, row, other_row), jnp.where(mine, live, other_live)
                column = jnp.where(paired, odd * units + unit, column)
            return expert, row, live, column, paired

        def walk(do):
            """Calls do(step, look ahead, expert, row, live, column, paired) for each tile; `step`
            counts K steps. It returns what its look ahead does: the next tile. Returns their
            number."""

            def turn(carry):
                i, *tile = carry
                return i + 1, *do(i * k_steps, lambda: look(i + 1), *tile)

            init = (jnp.int32(0), *look(0))
            return lax.while_loop(lambda carry: carry[1] >= 0, turn, init)[0] * k_steps

        def acquire(step):
            """Step 0 frees a slot too: that of the step before it, stages - 1 from now."""
            slot = lax.rem(step, config.stages)
            pl.when(step >= config.stages - 1)(lambda: plgpu.barrier_wait(empty.at[slot]))
            return slot

        def halves(column):
            """The two 128-column blocks of the weights that column tile `column` takes."""
            if fused:  # gate and up
                return column, column + out_columns // GROUP
            return 2 * column, 2 * column + 1

        def load(first, look_ahead, expert, row, live, column, paired):
            """Fills a slot a K step.

            Whatever is shared, a block's slot receives the same operands in as many copies, and its
            two `full` barriers expect all their bytes. Half of a shared operand comes from the
            peer, perhaps before this block expects it: the phase stays open, for its own arrivals
            are missing. It never comes before the slot is free, since `empty` counts all four
            computing warpgroups of the cluster in either block; nor a phase early, since they free
            a slot after they saw it full. Both blocks look at the same pair of tiles: they agree on
            what is shared and on the number of steps.
            """
            slab, groups = lax.div(row, slab_rows), halves(column)
            following = look_ahead()

            def steps(rows, weights_axes, tokens_axes):
                def body(i, _):
                    slot = acquire(first + i)
                    depths = pl.ds(i * depth, depth)
                    plgpu.copy_gmem_to_smem(
                        a_ref.at[pl.ds(row, rows), depths],
                        a_smem.at[slot, pl.ds(0, rows)],
                        full.at[slot],
                        collective_axes=tokens_axes,
                    )
                    if scaled:
                        plgpu.copy_gmem_to_smem(
                            a_scales_ref.at[
                                slab * k_steps + i, pl.ds(row - slab * slab_rows, rows)
                            ],
                            a_scales_smem.at[slot, pl.ds(0, rows)],
                            full.at[slot],
                        )
                    for half, group in enumerate(groups):
                        plgpu.copy_gmem_to_smem(
                            b_ref.at[expert, pl.ds(group * GROUP, GROUP), depths],
                            weights(slot, half),
                            (full, full_other)[half].at[slot],
                            collective_axes=weights_axes,
                        )

                lax.fori_loop(0, k_steps, body, None)

            axes = None if interpret else own("peer")
            alone = axes if cluster > 1 else None
            few, many = (functools.partial(steps, n, None, alone) for n in (_WGMMA_ROWS, ROWS))
            way = (live > _WGMMA_ROWS).astype(I32)
            if cluster > 1:  # of many rows each
                pairs = functools.partial(steps, ROWS, axes, None)
                lax.switch(way + paired.astype(I32), [few, many, pairs])
            else:
                lax.cond(way, many, few)
            return following

        def tokens(slot, start):
            return a_smem.at[slot, pl.ds(start, _WGMMA_ROWS)]

        def weights(slot, half):
            return b_smem.at[slot, pl.ds(half * GROUP, GROUP)]

        def following(slot):
            return jnp.where(slot == config.stages - 1, 0, slot + 1)

        def release_previous(slot):
            """A warpgroup's arrival is that of one of its threads, so a slot is freed only once a
            product of the next K step is done: that one started when all had read this slot."""
            plgpu.barrier_arrive(empty.at[jnp.where(slot == 0, config.stages, slot) - 1])

        def arrived(slot, half):
            """The tokens and the first half of the weights come in one phase, the other half in
            another, by which the second product waits for its operands alone."""
            plgpu.barrier_wait((full, full_other)[half].at[slot])

        def accumulate_in_place(first, start, half):
            """bf16: the tensor cores keep the sums, of all columns or of one half."""

            def scope(acc):
                def body(_, slot):
                    arrived(slot, 0)
                    arrived(slot, 1)
                    right = b_smem.at[slot] if half is None else weights(slot, half)
                    plgpu.wgmma(acc, tokens(slot, start), right.transpose((1, 0)))
                    plgpu.wgmma_wait(1)
                    release_previous(slot)
                    return following(slot)

                lax.fori_loop(0, k_steps, body, lax.rem(first, config.stages))
                return acc[...]

            width = COLUMNS if half is None else GROUP
            sums = pl.run_scoped(scope, plgpu.ACC((_WGMMA_ROWS, width)))
            return [
                lax.slice(sums, (0, i), (_WGMMA_ROWS, i + GROUP)) for i in range(0, width, GROUP)
            ]

        def accumulate_in_registers(first, start, half, expert, column):
            """FP8: each K block's product is scaled before it is added. Also bf16, interpreted."""
            groups = halves(column)
            if half is not None:
                groups = [jnp.where(half == 0, *groups)]

            def b_scales_at(i):
                return [b_scales_ref[expert, g, i] if scaled else jnp.float32(1) for g in groups]

            def body(i, carry):
                slot, b_scales, sums = carry
                next_b_scales = b_scales_at(jnp.minimum(i + 1, k_steps - 1))
                arrived(slot, 0)
                if half is not None:
                    arrived(slot, 1)
                if scaled:
                    a_scales = regs.load(
                        a_scales_smem.at[slot, pl.ds(start, _WGMMA_ROWS)], token_vector
                    )
                for n in range(len(groups)):
                    if n:
                        arrived(slot, n)
                    right = weights(slot, n if half is None else half)
                    partial = _product(tokens(slot, start), right, interpret)
                    if n == 0:
                        release_previous(slot)
                    if scaled:
                        scales = regs.along_rows(b_scales[n] * a_scales, partial.shape, accumulator)
                        partial = partial * scales
                    sums[n] += partial
                return following(slot), next_b_scales, sums

            zeros = regs.cast(jnp.zeros((_WGMMA_ROWS, GROUP), F32), accumulator)
            init = (lax.rem(first, config.stages), b_scales_at(0), [zeros] * len(groups))
            return lax.fori_loop(0, k_steps, body, init)[2]

        def compute(first, look_ahead, expert, row, live, column, paired):
            """With 64 rows or fewer, the warpgroups share out the columns; or one rests: where gate
            and up columns must meet, and for bf16, for which ptxas would serialise WGMMAs that
            accumulate in place in either of two loops."""
            del paired

            def product(start, half=None):
                if scaled or interpret:
                    sums = accumulate_in_registers(first, start, half, expert, column)
                else:
                    sums = accumulate_in_place(first, start, half)
                following = look_ahead()  # The sums leave no registers to do so earlier.
                mine = live - start
                if not fused:
                    for n, x in enumerate(sums):
                        group = 2 * column + (n if half is None else half)
                        write(x, row + start, mine, group * GROUP)
                    return following
                x = fused.product(*map(as_bf16, sums), regs.inverse(accumulator))
                if quantized:
                    quantize(x, row + start, mine, lax.div(row, slab_rows), column)
                else:
                    write(x, row + start, mine, column * GROUP)
                return following

            def rest():
                def body(_, slot):
                    arrived(slot, 0)
                    arrived(slot, 1)
                    # A barrier of the warpgroup, which products are otherwise: one thread's arrival
                    # must not let the ring turn before the other warps have seen this phase.
                    plgpu.commit_smem()
                    release_previous(slot)
                    return following(slot)

                lax.fori_loop(0, k_steps, body, lax.rem(first, config.stages))
                return look_ahead()

            start = warpgroup * _WGMMA_ROWS
            if scaled and not fused:
                few = functools.partial(product, 0, warpgroup)
                return lax.cond(live > _WGMMA_ROWS, lambda: product(start), few)
            return lax.cond(live > start, lambda: product(start), rest)

        def in_pieces(do, mine, room):
            """do(first row, rows) for the rows that this tile owns of a warpgroup's 64; `room` is
            that of the array, which a copy must not exceed."""
            whole = False
            if room >= _WGMMA_ROWS:
                whole = mine > _WGMMA_ROWS - piece
                pl.when(whole)(lambda: do(0, _WGMMA_ROWS))
            for at in range(0, min(_WGMMA_ROWS, room), piece):
                pl.when(jnp.logical_not(whole) & (mine > at))(functools.partial(do, at, piece))

        def store(staged, destination, mine):
            """Copies rows as one group of copies."""

            def copy(at, rows):
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(at, rows)], destination(at, rows), commit_group=False
                )

            in_pieces(copy, mine, m)
            plgpu.commit_smem_to_gmem_group()

        def write(x, row, mine, column):
            """Of the two buffers, the one that was copied last may still be read."""
            for i, start in enumerate(range(0, GROUP, _CHUNK)):
                staged = out_smem.at[warpgroup, i]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                part = lax.slice(x, (0, start), (_WGMMA_ROWS, start + _CHUNK))
                staged[...] = part.astype(BF16)
                plgpu.commit_smem()
                store(
                    staged,
                    lambda at, rows, start=start: out_refs[0].at[
                        pl.ds(row + at, rows), pl.ds(column + start, _CHUNK)
                    ],
                    mine,
                )

        def quantize(x, row, mine, slab, column):
            values_ref, scales_ref = out_refs
            values, scales = quantize_tile(x, accumulator, fused.rule, regs)
            staged, staged_scales = out_smem.at[warpgroup], more[-1].at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # All have read the scales, too.
            staged[...] = values
            staged_scales[...] = scales
            plgpu.commit_smem()
            store(
                staged,
                lambda at, rows: values_ref.at[pl.ds(row + at, rows), pl.ds(column * GROUP, GROUP)],
                mine,
            )
            group, at = slab * (out_columns // GROUP) + column, row - slab * slab_rows

            def copy(start, rows):
                scales = regs.load(staged_scales.at[pl.ds(start, rows)], vector(rows))
                scales_ref[group, pl.ds(at + start, rows)] = scales

            in_pieces(copy, mine, slab_rows)

        def producer():
            plgpu.set_max_registers(_REGISTERS["load"], action="decrease")
            steps = walk(load)
            # A block must outlive its peers' signals; interpret mode wants every phase seen, too.
            for i in range(config.stages):
                acquire(steps + i)

        def consumer():
            plgpu.set_max_registers(_REGISTERS["compute"], action="increase")
            steps = walk(compute)
            plgpu.wait_smem_to_gmem(0)
            release_previous(lax.rem(steps, config.stages))

        lax.cond(warpgroup == _WARPGROUPS, producer, consumer)

    scratch_types = [
        _swizzled((config.stages, ROWS, depth), a.dtype),
        _swizzled((config.stages, COLUMNS, depth), a.dtype),
        _swizzled((_WARPGROUPS, _WGMMA_ROWS, GROUP), FP8)
        if quantized
        else _swizzled((_WARPGROUPS, GROUP // _CHUNK, _WGMMA_ROWS, _CHUNK), BF16),
        plgpu.Barrier(num_arrivals=2 + scaled, num_barriers=config.stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=config.stages),
        _freed(config.stages, interpret),
    ]
    if scaled:
        scratch_types.append(plgpu.SMEM((config.stages, ROWS), F32))
    if quantized:
        scratch_types.append(plgpu.SMEM((_WARPGROUPS, _WGMMA_ROWS), F32))
    out = plgpu.kernel(
        wide_gemm,
        out_type=out_types,
        scratch_types=scratch_types,
        grid=(clusters * cluster if interpret else clusters,),
        grid_names=(own("cluster"),),
        **({} if interpret else {"cluster": (cluster,), "cluster_names": (own("peer"),)}),
        num_threads=_WARPGROUPS + 1,
        thread_name=own("warpgroup"),
        # The barriers above order all accesses; Mosaic's own would stall the producer.
        compiler_params=_PARAMS(
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=512,  # unused: rows are reduced within a warp
            approx_math=fused is not None,  # as act_quant
        ),
        interpret=interpreter() if interpret else False,
    )(*operands)
    return _outputs(out, m, out_columns)


def _product(left, right, interpret: bool) -> Array:
    """left @ right.T"""
    if interpret:  # whose wgmma takes no transposed operand
        return jnp.dot(left[...].astype(F32), right[...].astype(F32).T)

    def scope(acc):
        plgpu.wgmma(acc, left, right.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(scope, plgpu.ACC((left.shape[0], right.shape[0])))
