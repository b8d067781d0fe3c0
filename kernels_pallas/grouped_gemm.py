"""Grouped GEMM on Hopper's tensor cores, bf16 or FP8 with f32 scales, whatever the layout.

Weights may be FP4 (`fp4`) beside FP8 tokens: WGMMA takes its first operand from registers, too, so
that each warpgroup widens the 64 rows it has to FP8, whose products are then those of FP8 weights,
bit for bit, from half the bytes.

The product is computed transposed, D^T = W x^T: WGMMA's first operand always has 64 rows, and there
are always 64 weight rows to give it, where an expert may have a single token. Tokens are the second
operand, in steps of 8.

A persistent grid of clusters. In each block one warpgroup loads K blocks of weights, tokens and
scales into a ring of shared memory, running ahead into the next tile; two others compute. The
blocks of a cluster take neighbouring columns of one tile and share its tokens: each loads a part of
them and multicasts it. Tiles are walked in order, all columns of one before the next, so that
blocks of one expert run together and share its weights in the L2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import fp4
from ._common import (
    _PARAMS,
    BF16,
    F32,
    I32,
    TRIED,
    Registers,
    as_bf16,
    interpreter,
    own,
    own_index,
    spread_rows,
    vector,
)
from .act_quant import ACTIVATIONS, Inverse
from .quant import GROUP, Rule, quantize_tile, quantized_type

_ROW_BYTES = 128  # of K in a stage: the widest swizzle, 64 bf16 or 128 FP8 values
_FP4_ROW_BYTES = 68  # the same 128 values, and 4 exponents
_WGMMA_ROWS = 64
_WARPGROUPS = 2  # that compute; each has 64 of every 128 columns
_SMS = 132  # of an H100 or H200 SXM
_SMEM_BYTES = 227 * 1024
_SMEM_RESERVED = 5 * 1024  # Mosaic's reduction scratch, barriers, alignment of the buffers
_REGISTERS = {"load": 24, "compute": 240}  # of a thread; 128 * (24 + 2 * 240) <= 64 Ki
_OUTPUT_BYTES = 8 * 1024  # of the rows that an epilogue lays out at a time, in one of two buffers


class Config(NamedTuple):
    """How a block does a tile."""

    columns: int  # of the output, which are rows of the weights: 128 or 256
    widths: tuple[int, ...]  # numbers of token rows there is code for; the last is the tile's rows
    stages: int  # K blocks in flight
    cluster: int = 1  # blocks that share the tokens


class Fused(NamedTuple):
    """What is done to the product of the gate and up weights before it is written."""

    activation: str
    params: tuple[float | None, ...]
    quantized: bool
    ue8m0: bool = False
    keep_fp32: bool = True  # the product, until it is quantised

    @property
    def rule(self) -> Rule:
        return Rule(ue8m0=self.ue8m0)

    def product(self, gate: Array, up: Array, inverse: Inverse) -> Array:
        """What is quantised, from gate and up in f32 as `gemm` would write them."""
        product = ACTIVATIONS[self.activation](gate, up, *self.params, inverse=inverse)
        return product if self.keep_fp32 else as_bf16(product)


def choose_config(tile: int, n: int, *, fused: bool = False, narrow: bool = False) -> Config:
    """The configuration for tiles of `tile` rows and N columns.

    Code for finer widths spares loads of tokens that are not there and their products; below half
    of a large tile the time is that of reading weights. Sharing tokens in a cluster relieves the L2
    (FP8, w13 of E 256, H 7168, I 2048: 2525 us against 2690 at 128 rows an expert, 1910 against
    1927 at 32); multicast splits rows in multiples of 16, which tiles of few rows do without.
    """
    step = 8 if tile <= 32 else 16 if tile <= 160 else 32
    fine = range(step, tile, step)
    widths = (*(w for w in fine if tile <= 64 or w > tile // 2 or w % (2 * step) == 0), tile)
    # FP4: one half's weights are widened while the other's are multiplied.
    wide = fused or (narrow and tile <= 64 and n % (2 * GROUP) == 0)
    columns = 2 * GROUP if wide else GROUP
    cluster = 2 if n // columns % 2 == 0 and all(w % 16 == 0 for w in widths) else 1
    return Config(columns, widths, most_stages(columns, tile, narrow=narrow), cluster)


def most_stages(columns: int, rows: int, *, narrow: bool = False) -> int:
    column_bytes = _FP4_ROW_BYTES if narrow else _ROW_BYTES
    stage = columns * column_bytes + rows * _ROW_BYTES + _scale_rows(rows) * 4
    return min(12, (_SMEM_BYTES - _SMEM_RESERVED - 2 * _OUTPUT_BYTES) // stage)


def _scale_rows(rows: int) -> int:
    # A copy into shared memory must have a multiple of 128 bytes.
    return -(-rows // 32) * 32


def _fp4_in_registers():
    """The module that does it, of parts of JAX that have no public name."""
    if jax.__version__ not in TRIED:
        raise NotImplementedError(
            f"jax {jax.__version__}: FP4 weights are widened in registers with the versions tried,"
            f" {' and '.join(TRIED)}; prepare them for backend='deep_gemm' or 'auto', as FP8"
        )
    from . import _fp4_registers

    return _fp4_registers


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
    """`gemm` or, with `fused`, `gemm_act_quant` with the configuration given."""
    (m, k), columns, narrow = a.shape, config.columns, b.dtype == I32
    unit = fp4.ROWS if narrow else 1  # of the weights' rows
    n = b.shape[1] * unit
    out_columns = n // 2 if fused else n
    quantized = fused is not None and fused.quantized
    out_types = output_types(m, out_columns, slabs, fused)
    if quantized:
        by_group = (m, out_columns // GROUP, GROUP)
        out_types = (out_types[0].update(shape=by_group), out_types[1])
    if m == 0 or tiles.shape[1] == 0:
        return _outputs([jnp.zeros(t.shape, t.dtype) for t in out_types], m, out_columns)
    scaled, most = a_scales is not None, config.widths[-1]
    operands = _operands(a, a_scales, b, b_scales, tiles, most, interpret)

    depth, slab_rows = _ROW_BYTES // a.dtype.itemsize, m // slabs
    k_steps, halves = k // depth, columns // (_WARPGROUPS * _WGMMA_ROWS)
    cluster = 1 if interpret else config.cluster  # jax 0.11.2's interpreter has no multicast
    column_tiles = n // (columns * cluster)
    clusters = min(_SMS // cluster, tiles.shape[1] * column_tiles)
    chunk_rows = _OUTPUT_BYTES // (GROUP * (4 if quantized else 2))
    regs = Registers(interpret)
    accumulator, token_vector = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
    inverse = regs.inverse(accumulator)

    if narrow and not interpret:
        registers = _fp4_in_registers()

    def grouped_gemm(*refs):
        a_ref, b_ref, tiles_ref, *scale_refs = refs[: len(operands)]
        out_refs = refs[len(operands) : len(operands) + len(out_types)]
        a_smem, b_smem, out_smem, full, empty, *more = refs[len(operands) + len(out_types) :]
        warpgroup = own_index("warpgroup")
        if scaled:
            (a_scales_ref, b_scales_ref, *table_refs), a_scales_smem = scale_refs, more[0]

        def look(turn):
            """(expert, first row, live rows, column) of this block's work number `turn`."""
            index = own_index("cluster") + turn * clusters
            t, column = lax.div(index, column_tiles), lax.rem(index, column_tiles)
            if cluster > 1:
                column = column * cluster + own_index("peer")
            inside = t < tiles.shape[1]
            t = jnp.minimum(t, tiles.shape[1] - 1)
            return jnp.where(inside, tiles_ref[0, t], -1), tiles_ref[1, t], tiles_ref[2, t], column

        def walk(do):
            """Calls do(width, sure, step, expert, row, live, column) for each tile: `width` rows
            hold the live ones, of which there are more than `sure`; `step` counts K steps. Returns
            their number."""

            def turn(carry):
                i, step, expert, row, live, column = carry
                following = look(i + 1)  # Read a tile ahead: neither role then waits for it.
                branches = [
                    functools.partial(do, width, sure, step, expert, row, live, column)
                    for sure, width in zip((0, *config.widths), config.widths, strict=False)
                ]
                if len(branches) == 1:
                    branches[0]()
                else:
                    lax.switch(sum((live > w).astype(I32) for w in config.widths[:-1]), branches)
                return i + 1, step + k_steps, *following

            init = (jnp.int32(0), jnp.int32(0), *look(0))
            return lax.while_loop(lambda carry: carry[2] >= 0, turn, init)[1]

        def acquire(step):
            """Step 0 frees a slot too: that of the step before it, stages - 1 from now."""
            slot = lax.rem(step, config.stages)
            pl.when(step >= config.stages - 1)(lambda: plgpu.barrier_wait(empty.at[slot]))
            return slot

        def load(width, sure, first, expert, row, live, column):
            slab = lax.div(row, slab_rows)

            def body(i, _):
                slot = acquire(first + i)
                depths = pl.ds(i * depth, depth)
                for half in range(halves if fused else 1):
                    rows = (GROUP if fused else columns) // unit
                    source = column * rows + half * (out_columns // unit)
                    plgpu.copy_gmem_to_smem(
                        b_ref.at[expert, pl.ds(source, rows), i if narrow else depths],
                        b_smem.at[slot, pl.ds(half * rows, rows)],
                        full.at[slot],
                    )
                plgpu.copy_gmem_to_smem(
                    a_ref.at[pl.ds(row, width), depths],
                    a_smem.at[slot, pl.ds(0, width)],
                    full.at[slot],
                    collective_axes=own("peer") if cluster > 1 else None,
                )
                if scaled:
                    copied = _scale_rows(width)
                    plgpu.copy_gmem_to_smem(
                        a_scales_ref.at[slab * k_steps + i, pl.ds(row - slab * slab_rows, copied)],
                        a_scales_smem.at[slot, pl.ds(0, copied)],
                        full.at[slot],
                    )

            lax.fori_loop(0, k_steps, body, None)

        def weights(slot, half):
            if fused:  # gate and up rows of the same columns
                start = half * GROUP + warpgroup * _WGMMA_ROWS
            else:
                start = (warpgroup * halves + half) * _WGMMA_ROWS
            if not narrow:
                return b_smem.at[slot, pl.ds(start, _WGMMA_ROWS)]
            tile = b_smem.at[slot, lax.div(start, unit)]
            if interpret:
                return fp4.widen(tile[...][None, None], table_refs[0][...])
            return registers.widen(*registers.load(tile, regs), more[1].at[warpgroup])

        def tokens(slot, start, size):
            return a_smem.at[slot, pl.ds(start, size)]

        def following(slot):
            return jnp.where(slot == config.stages - 1, 0, slot + 1)

        def release_previous(slot):
            """A warpgroup's arrival is that of one of its threads, so a slot is freed only once a
            product of the next K step is done: that one started when all had read this slot."""
            plgpu.barrier_arrive(empty.at[jnp.where(slot == 0, config.stages, slot) - 1])

        def accumulate_in_place(width, first):
            """bf16: the tensor cores keep the sums."""

            def scope(*sums):
                def body(i, slot):
                    plgpu.barrier_wait(full.at[slot])
                    for half, acc in enumerate(sums):
                        right = tokens(slot, 0, width).transpose((1, 0))
                        plgpu.wgmma(acc, weights(slot, half), right)
                    plgpu.wgmma_wait(halves)
                    release_previous(slot)
                    return following(slot)

                lax.fori_loop(0, k_steps, body, lax.rem(first, config.stages))
                return [[acc[...]] for acc in sums]

            return pl.run_scoped(scope, *[plgpu.ACC((_WGMMA_ROWS, width))] * halves)

        def product(left, right, meanwhile):
            """left @ right.T, and the result of `meanwhile`, called while tensor cores work."""
            if interpret:  # whose wgmma takes no transposed operand
                return jnp.dot(left[...].astype(F32), right[...].astype(F32).T), meanwhile()

            def scope(acc):
                plgpu.wgmma(acc, left, right.transpose((1, 0)))
                other = meanwhile()
                return acc[...], other

            return pl.run_scoped(scope, plgpu.ACC((left.shape[0], right.shape[0])))

        def accumulate_in_registers(width, first, expert, column):
            """FP8: each K block's product is scaled before it is added. Also bf16, interpreted."""
            parts = _parts(width, halves, narrow)
            if fused:
                groups = [column, column + out_columns // GROUP]
            else:
                groups = [lax.div(column * columns + warpgroup * _WGMMA_ROWS * halves, GROUP)]

            def b_scales_at(i):
                return [b_scales_ref[expert, g, i] if scaled else jnp.float32(1) for g in groups]

            def body(i, carry):
                slot, b_scales, sums = carry
                next_b_scales = b_scales_at(jnp.minimum(i + 1, k_steps - 1))
                plgpu.barrier_wait(full.at[slot])
                ahead, scales = None, [None] * len(parts)
                for half in range(halves):
                    left = weights(slot, half) if ahead is None else ahead
                    for p, (start, size) in enumerate(parts):

                        def both_scales(half=half, p=p, start=start, size=size):
                            if half >= len(groups):
                                return scales[p]  # of the half before
                            if not scaled:
                                return b_scales[half]
                            ref = a_scales_smem.at[slot, pl.ds(start, size)]
                            both = b_scales[half] * regs.load(ref, token_vector)
                            both = lax.broadcast_in_dim(both, (_WGMMA_ROWS, size), (1,))
                            return regs.cast(both, accumulator)

                        def meanwhile(half=half, both_scales=both_scales):
                            # FP4, where registers allow: the other half is widened meanwhile.
                            more_left = narrow and len(parts) == 1 and half + 1 < halves
                            return both_scales(), weights(slot, half + 1) if more_left else None

                        right = tokens(slot, start, size)
                        partial, (scales[p], ahead) = product(left, right, meanwhile)
                        if p == half == 0:
                            release_previous(slot)
                        sums[half][p] += partial * scales[p]
                return following(slot), next_b_scales, sums

            zeros = [
                regs.cast(jnp.zeros((_WGMMA_ROWS, size), F32), accumulator) for _, size in parts
            ]
            init = (lax.rem(first, config.stages), b_scales_at(0), [zeros] * halves)
            return lax.fori_loop(0, k_steps, body, init)[2]

        def compute(width, sure, first, expert, row, live, column):
            if scaled or interpret:
                sums = accumulate_in_registers(width, first, expert, column)
            else:
                sums = accumulate_in_place(width, first)
            if not fused:
                write(sums, width, sure, row, live, column * columns)
                return
            gated = [
                fused.product(*(x.astype(BF16).astype(F32) for x in pair), inverse)
                for pair in zip(*sums, strict=True)
            ]
            if quantized:
                quantize(gated, width, row, live, column)
            else:
                write([gated], width, sure, row, live, column * GROUP)

        def stage(ref, x):
            """Writes x, tokens along its second dimension, with tokens along the first."""
            if interpret:
                ref[...] = x.T
            else:
                ref = ref.transpose((1, 0))
                ref[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

        def write(halves, width, sure, row, live, column):
            owned = (sure // alignment + 1) * alignment  # rows at least
            for half, sums in enumerate(halves):
                first_column = column + (warpgroup * len(halves) + half) * _WGMMA_ROWS
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for i, (start, x) in enumerate(_chunks(sums, chunk_rows)):
                    staged, size = out_smem.at[warpgroup, i % 2], x.shape[1]

                    def copy(at, rows, start=start, staged=staged, first_column=first_column):
                        plgpu.copy_smem_to_gmem(
                            staged.at[pl.ds(at - start, rows)],
                            out_refs[0].at[pl.ds(row + at, rows), pl.ds(first_column, _WGMMA_ROWS)],
                        )

                    def chunk(i=i, start=start, size=size, x=x, staged=staged, copy=copy):
                        if i > 1:  # All chunks before the last live one have been copied.
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        stage(staged.at[pl.ds(0, size)], x.astype(BF16))
                        plgpu.commit_smem()
                        known = min(size, max(0, owned - start))
                        if known:
                            copy(start, known)
                        for at in range(start + known, start + size, alignment):
                            rows = min(alignment, start + size - at)
                            pl.when(live > at)(functools.partial(copy, at, rows))

                    if start < owned:
                        chunk()
                    else:
                        pl.when(live > start)(chunk)

        def quantize(gated, width, row, live, column):
            """Rows need all 128 columns of both warpgroups: they meet in shared memory, some tokens
            at a time, in two buffers, so that one barrier a turn is enough."""
            values_ref, scales_ref = out_refs
            met = more[-1]
            slab = lax.div(row, slab_rows)
            step = chunk_rows if all(x.shape[1] % chunk_rows == 0 for x in gated) else 8
            rows = min(alignment, max(8, step // _WARPGROUPS))
            layout = spread_rows(rows, GROUP, 4)
            chunks = _chunks(gated, step)
            for i, (first, x) in enumerate(chunks):
                staged = out_smem.at[i % 2]
                stage(staged.at[pl.ds(0, step), pl.ds(warpgroup * _WGMMA_ROWS, _WGMMA_ROWS)], x)
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)
                for start in range(0, step, _WARPGROUPS * rows):
                    start = start + warpgroup * rows

                    def piece(start=start, at=row + first + start, staged=staged):
                        x = regs.load(staged.at[pl.ds(start, rows)], layout)
                        values, scales = quantize_tile(x, layout, fused.rule, regs)
                        values_ref[pl.ds(at, rows), column, :] = values
                        group = slab * (out_columns // GROUP) + column
                        scales_ref[group, pl.ds(at - slab * slab_rows, rows)] = scales

                    pl.when((start < step) & (live > first + start))(piece)
            if len(chunks) % 2:  # The next tile begins with the buffer that was read last.
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

        def producer():
            plgpu.set_max_registers(_REGISTERS["load"], action="decrease")
            steps = walk(load)
            # A block must outlive its peers' signals; interpret mode wants every phase seen, too.
            for i in range(config.stages):
                acquire(steps + i)

        def consumer():
            plgpu.set_max_registers(_REGISTERS["compute"], action="increase")
            if narrow and not interpret:
                more[1].at[warpgroup][...] = regs.load(table_refs[0], vector(fp4.TABLE.size))
                plgpu.commit_smem()
            steps = walk(compute)
            plgpu.wait_smem_to_gmem(0)
            release_previous(lax.rem(steps, config.stages))

        lax.cond(warpgroup == _WARPGROUPS, producer, consumer)

    copies = 2 + (fused is not None) + scaled
    scratch = [
        _swizzled((config.stages, most, depth), a.dtype),
        plgpu.SMEM((config.stages, columns // unit, *fp4.WORDS), I32)
        if narrow
        else _swizzled((config.stages, columns, depth), a.dtype),
        _swizzled((2, chunk_rows, GROUP), F32)
        if quantized
        else _swizzled((_WARPGROUPS, 2, chunk_rows, _WGMMA_ROWS), BF16),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        _freed(config.stages, interpret),
    ]
    if scaled:
        scratch.append(plgpu.SMEM((config.stages, _scale_rows(most)), F32))
    if narrow:
        scratch.append(plgpu.SMEM((_WARPGROUPS, fp4.TABLE.size), I32))
    if quantized:
        scratch.append(plgpu.Barrier(num_arrivals=_WARPGROUPS))
    out = plgpu.kernel(
        grouped_gemm,
        out_type=out_types,
        scratch_types=scratch,
        grid=(clusters,),
        grid_names=(own("cluster"),),
        **({} if interpret else {"cluster": (cluster,), "cluster_names": (own("peer"),)}),
        num_threads=_WARPGROUPS + 1,
        thread_name=own("warpgroup"),
        # The barriers above order all accesses; Mosaic's own would stall the producer.
        compiler_params=_PARAMS(
            unsafe_no_auto_barriers=True,
            approx_math=fused is not None,  # as act_quant
        ),
        interpret=interpreter() if interpret else False,
    )(*operands)
    return _outputs(out, m, out_columns)


def _swizzled(shape: tuple[int, ...], dtype) -> object:
    transforms = (
        plgpu.TilingTransform((8, _ROW_BYTES // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(_ROW_BYTES),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _freed(stages: int, interpret: bool) -> object:
    """Barriers by which the computing warpgroups free the ring's slots."""
    if interpret:
        return plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages)
    # Also for a cluster of one block: a warpgroup then arrives once rather than 128 times.
    return plgpu.ClusterBarrier(
        collective_axes=(own("peer"),), num_arrivals=_WARPGROUPS, num_barriers=stages
    )


def output_types(
    m: int, columns: int, slabs: int, fused: Fused | None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a grouped GEMM returns: quantised values and their scales, or bf16."""
    if fused is not None and fused.quantized:
        return quantized_type(m, columns, fused.rule, slabs)
    return (jax.ShapeDtypeStruct((m, columns), BF16),)


def _outputs(out, *shape: int) -> tuple[Array, ...]:
    return (out[0].reshape(shape), *out[1:])


def _operands(a, a_scales, b, b_scales, tiles, rows: int, interpret: bool) -> tuple[Array, ...]:
    """In the kernels' order, padded for copies of `rows` rows: what these read past the end is
    zeros on a GPU, as long as no copy is larger than the array."""
    operands = _pad_to(a, 0, a.shape[0] + rows if interpret else rows), b, tiles
    if a_scales is None:
        return operands
    copied = _scale_rows(rows)
    a_scales = _pad_to(a_scales, 1, a_scales.shape[1] + copied if interpret else copied)
    tables = (jnp.asarray(fp4.TABLE),) if b.dtype == I32 else ()
    return *operands, a_scales, b_scales, *tables


def _pad_to(x: Array, axis: int, size: int) -> Array:
    missing = size - x.shape[axis]
    if missing <= 0:
        return x
    return jnp.pad(x, [(0, missing if axis == i else 0) for i in range(x.ndim)])


def _chunks(sums: list[Array], most: int) -> list[tuple[int, Array]]:
    """(first token, its columns) of parts of one array side by side, `most` columns at a time."""
    chunks, first = [], 0
    for x in sums:
        for start in range(0, x.shape[1], most):
            stop = min(start + most, x.shape[1])
            chunks.append((first + start, lax.slice(x, (0, start), (x.shape[0], stop))))
        first += x.shape[1]
    return chunks


def _parts(width: int, halves: int, narrow: bool) -> list[tuple[int, int]]:
    """(start, size) of the parts of `width` tokens that FP8 multiplies one after the other, for the
    sums, one product and its scales to fit a thread's registers, and FP4's weights (`narrow`)."""
    if width <= ((128, 64) if narrow else (160, 128))[halves - 1]:
        return [(0, width)]
    first = -(-width // 32) * 16
    return [(0, first), (first, width - first)]
