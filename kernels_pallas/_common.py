"""What the kernels share: launching, register layouts, loads that work in interpret mode too."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TRIED = ("0.10.2", "0.11.2")
"""Versions of jax whose private names are used."""

F32, I32, BF16, FP8 = jnp.float32, jnp.int32, jnp.bfloat16, jnp.float8_e4m3fn

WARPS, LANES = 4, 32  # of one warpgroup, the unit that runs a kernel body

# jax 0.11 deprecates load's separate index argument, which 0.10 requires.
_LOAD_ARGS = (
    (None,)
    if inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty
    else ()
)
# 0.11.2 made warpgroup semantics the default; there layouts are inferred, here they are chosen.
_PARAMS = functools.partial(plgpu.CompilerParams, lowering_semantics=plgpu.LoweringSemantics.Lane)


def interpreter() -> object:
    """Parameters of Mosaic GPU interpret mode: unwritten memory reads as NaN or the largest int."""
    try:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    except ImportError as e:
        raise NotImplementedError(
            f"jax {jax.__version__} has no Mosaic GPU interpret mode where jax 0.10.2 and 0.11.2, "
            "the versions tried, keep it (jax._src.pallas.mosaic_gpu.interpret.params); run on a "
            "GPU or use one of those versions"
        ) from e
    return InterpretGPUParams(uninitialized_memory="nan", out_of_bounds_reads="raise")


def own(name: str) -> str:
    """A kernel's own name of an axis. Where an axis of the caller's mesh has the same name,
    `lax.axis_index` inside a kernel is that of the mesh (jax 0.10.2 and 0.11.2)."""
    return f"dgmoe_jax.{name}"


def own_index(name: str) -> Array:
    """Where this block, or warpgroup, is along an axis of its kernel's."""
    return lax.axis_index(own(name))


def launch(
    body: Callable,
    out_type: object,
    *,
    grid: dict[str, int],
    interpret: bool,
    scratch: tuple = (),
    barriers: bool = True,
    approx_math: bool = False,
) -> Callable:
    """`plgpu.kernel` over `grid` (name -> size; the last name varies fastest). A profile shows the
    name of `body`.

    `barriers=False` is for bodies in which no thread reads memory that another thread of the
    block wrote, unless `plgpu.commit_smem` (a barrier) stands between. `approx_math` allows the
    hardware's own elementary functions.
    """
    names = {"out_type": out_type, "scratch_types": scratch}
    if "out_type" not in inspect.signature(plgpu.kernel).parameters:
        names = {"out_shape": out_type, "scratch_shapes": scratch}
    return plgpu.kernel(
        body,
        grid=tuple(grid.values()),
        grid_names=tuple(map(own, grid)),
        compiler_params=_PARAMS(unsafe_no_auto_barriers=not barriers, approx_math=approx_math),
        interpret=interpreter() if interpret else False,
        **names,
    )


def pow2_floor(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def vector(n: int, vec: int = 1, warps: int = WARPS) -> plgpu.ParameterizedLayout:
    """Layout of [n], n a multiple of warps * 32 * vec or a power of two times vec: a thread holds
    `vec` neighbours. Fewer elements than threads are spread over the warps first; the rest of the
    threads hold copies."""
    warps = min(warps, n // vec)
    lanes = min(LANES, n // (vec * warps))
    if vec == 1 and warps > 1:
        # Neighbours in different warps, for loads from shared memory at any offset: neighbours in
        # one warp jax 0.11 loads by `ldmatrix`, which traps on rows that are not 16-byte aligned.
        tiles = [(lanes * warps,), *([(warps,)] if lanes > 1 else []), (1,)]
        return _layout(tiles, (warps, -2), (lanes, -3))
    tiles = [(warps * lanes * vec,)]
    if warps > 1:
        tiles.append((lanes * vec,))
    if lanes > 1:
        tiles.append((vec,))
    return _layout(tiles, (warps, -3 if lanes > 1 else -2), (lanes, -2))


def spread_rows(rows: int, cols: int, vec: int) -> plgpu.ParameterizedLayout:
    """Layout of [rows, cols], powers of two or multiples of a tile: a row lies within one warp, so
    that reducing over columns needs no shared memory; a warp takes several short rows."""
    lanes = min(LANES, cols // vec)
    in_warp = min(LANES // lanes, max(1, rows // WARPS))
    warps = min(WARPS, rows // in_warp)
    tiles = [(warps * in_warp, lanes * vec)]
    if in_warp == 1:
        if lanes > 1:
            tiles.append((vec,))
        return _layout(tiles, (warps, -3 if lanes > 1 else -2), (lanes, -2))
    if warps > 1:
        tiles.append((in_warp, lanes * vec))
    if lanes == 1:
        return _layout(tiles, (warps, -4), (in_warp, -2))
    tiles.append((vec,))
    return _layout(tiles, (warps, -5), (in_warp, -3), (lanes, -2))


def spread_groups(rows: int, group: int, vec: int) -> plgpu.ParameterizedLayout:
    """Layout of [rows, n, group], group 32 or 128 and rows a power of two or a multiple of 8: 128
    values of a row side by side in half a warp, further groups in further registers. One row alone,
    [n, group], is every warp's, 4 values a lane."""
    together = 128 // group
    if rows == 1:
        return _layout([(together, group), (4,)], (1, -1), (together, -3), (group // 4, -2))
    in_warp = 2 if rows >= 2 * WARPS else 1
    warps = min(WARPS, rows)
    tiles = [(warps * in_warp, together, group), (vec,)]
    if in_warp > 1:
        tiles.insert(1, (in_warp, together, group))
    rows_at = (warps, -7 if in_warp > 1 else -4)
    return _layout(tiles, rows_at, (in_warp, -4), (together, -3), (group // vec, -2))


def _layout(
    tiles: list[tuple[int, ...]], warps: tuple[int, int], *lanes: tuple[int, int]
) -> plgpu.ParameterizedLayout:
    """A TILED layout from (count, dimension) of warps and lanes; missing ones hold copies. Mosaic
    wants dimensions of size 1 left out."""

    def partition(parts: tuple[tuple[int, int], ...], total: int) -> tuple:
        copies = total // math.prod(n for n, _ in parts)
        named = tuple(dim for n, dim in parts if n > 1)
        return (plgpu.Replicated(copies), *named) if copies > 1 else named

    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)),
        warp_dims=partition((warps,), WARPS),
        lane_dims=partition(lanes, LANES),
        vector_dim=-1,
    )


def piece(first: Array | int, start: int, length: int) -> tuple:
    """Where [start, start + length) of a block lies in global and in shared memory, its layout."""
    if length == 1:
        return first + start, start, None
    return pl.ds(first + start, length), pl.ds(start, length), vector(length)


def for_pieces(move: Callable, block: Array, n: int, size: int) -> None:
    """move(start, length) for pieces that cover this block's share of n: `size`, in the last block
    the rest, as two powers of two that may overlap, and then nothing."""
    last = pl.cdiv(n, size) - 1

    def rest():
        count = n - last * size
        part = count if count == size else pow2_floor(count)
        for start in sorted({0, count - part}):
            move(start, part)

    pl.when(block == last)(rest)
    if last:
        pl.when(block < last)(lambda: move(0, size))


class Registers:
    """Loads and casts that name a register layout on a GPU; interpret mode knows no layouts."""

    def __init__(self, interpret: bool):
        self.interpret = interpret

    def cast(self, x: Array, layout: plgpu.ParameterizedLayout) -> Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def load(self, ref: object, layout: plgpu.ParameterizedLayout | None) -> Array:
        """Reads `ref`, in global or shared memory; the innermost dimension in whole vectors. A
        scalar has no layout."""
        if self.interpret or layout is None:
            return ref[...]
        return plgpu.load(ref, *_LOAD_ARGS, layout=layout, optimized=False)

    def load_as(self, ref: object, shape: tuple, layout: plgpu.ParameterizedLayout) -> Array:
        """`load` of an array that splits the dimensions of `ref`."""
        if self.interpret:
            return ref[...].reshape(shape)
        return self.load(ref if ref.shape == shape else ref.reshape(shape), layout)

    def store(self, ref: object, x: Array) -> None:
        """Writes x to `ref`, whose dimensions x may split."""
        if self.interpret or ref.shape == x.shape:
            ref[...] = x.reshape(ref.shape)
        else:
            ref.reshape(x.shape)[...] = x

    def store_transposed(self, ref: object, x: Array) -> None:
        """Writes x [a, b] to `ref` [b, a], in global memory; [b] as it is."""
        if self.interpret or x.ndim < 2:
            ref[...] = x.T
        else:
            ref.transpose((1, 0))[...] = x

    def full(self, shape: tuple, value: int, layout: plgpu.ParameterizedLayout) -> Array:
        """int32 that fills registers of `layout`, as a loop carry must."""
        return self.cast(jnp.full(shape, value, I32), layout)

    def iota(self, shape: tuple, dim: int, layout: plgpu.ParameterizedLayout) -> Array:
        return self.cast(lax.broadcasted_iota(I32, shape, dim), layout)

    def divide(self, x: Array, by: float) -> Array:
        """x / by, rounded correctly."""
        if self.interpret:  # XLA would multiply by the inverse of a constant
            return x / lax.optimization_barrier(jnp.full_like(x, by))
        quotient = _quotient(x, by, float(np.float32(1) / np.float32(by)))
        return jnp.where(jnp.abs(x) < jnp.inf, quotient, x)  # Inf has no remainder

    def inverse(self, layout: plgpu.ParameterizedLayout) -> Callable[[Array], Array]:
        """x -> 1 / x of f32 in `layout`, within an ulp of what f32 rounds to; beyond 2^126 maybe 0.

        Mosaic's own division spends six instructions on inverses that are subnormal or infinite.
        """
        # A single instruction has no public name; in versions that were not tried division is only
        # slower.
        if self.interpret or jax.__version__ not in TRIED:
            return lambda x: 1.0 / x

        def approximate(x):
            out_type = plgpu.ShapeDtypeStruct(x.shape, F32, layout=layout)

            @plgpu.inline_mgpu(arg_types=(layout,), return_type=out_type)
            def reciprocal(_, x):
                return x._pointwise(x._lift_fast_instr("rcp.approx.ftz.f32"))

            return reciprocal(x)

        return approximate

    def divide_rows(self, x: Array, by: Array, layout: plgpu.ParameterizedLayout) -> Array:
        """x [.., cols] / by [..], positive or NaN; rounded correctly. One row: a scalar."""
        if self.interpret:
            return x / self.along_rows(by, x.shape, layout)
        inverse = 1.0 / by
        # With by = Inf the remainder must be that of x / huge: x itself, times an inverse of 0.
        by = jnp.where(by == jnp.inf, 0.0, by)
        inverse = inverse + inverse * (1.0 - by * inverse)
        by, inverse = (self.along_rows(v, x.shape, layout) for v in (by, inverse))
        return _quotient(x, by, inverse)

    def along_rows(self, x: Array, shape: tuple, layout: plgpu.ParameterizedLayout) -> Array:
        """[..] -> [.., cols], x repeated along columns; x is a row reduction in `layout`. One row
        is a scalar, which needs no spreading."""
        if not x.shape:
            return x
        return self.cast(lax.broadcast_in_dim(x, shape, tuple(range(x.ndim))), layout)


def as_bf16(x: Array) -> Array:
    """f32 rounded to bf16, in f32. Without the barrier XLA may drop the rounding, and LLVM rounds
    values one by one, each in four times the time. For layouts of at most two values in a register,
    as WGMMA's: with more, jax 0.10.2's and 0.11.2's barrier gives them back in another order."""
    return lax.optimization_barrier(x.astype(BF16)).astype(F32)


def _quotient(x: Array, by: Array | float, inverse: Array | float) -> Array:
    """x / by, rounded correctly: Mosaic's own division is not, since XLA's options for the GPU make
    it approximate. `inverse` is 1 / by, rounded. The remainder is exact in the fused multiply-adds
    that Mosaic's arithmetic allows, and adding its share rounds right (Markstein's theorem)."""
    quotient = x * inverse
    return quotient + (x - quotient * by) * inverse
