"""Slabs in FP8 with a scale per row and 128 columns -> FP8 with one scale for all, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import _PARAMS, F32, FP8, I32, Registers, for_pieces, interpreter, own, own_index
from .quant import E4M3_MAX, GROUP, unit_layout

STEP = 8  # groups of a row that a block takes at a time: 8 bytes of FP8 a thread
BLOCKS = 4096  # that a launch should have; beyond, a block takes several rows


def requant(
    x: Array,
    scales: Array,
    masked_m: Array,
    output_scale: Array,
    out: Array,
    *,
    mn_major: bool = False,
    interpret: bool = False,
) -> Array:
    """`out` with out[e, r] = x[e, r] * scales[e, r] / output_scale for the rows r < masked_m[e].

    Args:
      x: [E, M, H] float8_e4m3fn, H % 128 == 0.
      scales: [E, M, H / 128] f32, or with `mn_major` [E, H / 128, S], S >= M, as the quantising
        kernels of this package and DeepEP's low-latency dispatch lay them.
      masked_m: [E] int32, live rows of each expert, at most M each.
      output_scale: [] or [1] f32, what the result is to be multiplied by.
      out: [E, M, H] float8_e4m3fn. Its other rows are returned as they are; its memory becomes the
        result's where the caller does not need it any more (donates it).

    Products are f32, the second with the inverse of output_scale; beyond +-448 they become +-448,
    NaN stays (the rule of SGLang's fp8_per_token_to_per_tensor_quant_triton).

    Raises ValueError or TypeError for shapes or dtypes that do not fit.
    """
    check(x, scales, masked_m, output_scale, out, mn_major)
    experts, m, groups = *x.shape[:2], x.shape[2] // GROUP
    if x.size == 0:
        return out
    regs, columns = Registers(interpret), pl.cdiv(groups, STEP)
    row_blocks = min(m, max(1, BLOCKS // (experts * columns)))

    def requantise(x_ref, scales_ref, masked_m_ref, inverse_ref, out_ref):
        e, first, column = map(own_index, "erc")
        inverse = inverse_ref[0]

        def row(i, _):
            r = first + i * row_blocks

            def move(start, count):
                here = column * STEP + start
                here = here if count == 1 else pl.ds(here, count)
                layout = unit_layout(count, 1, GROUP)
                values = regs.load(x_ref.at[e, r, here, :], layout).astype(F32)
                at = (e, here, r) if mn_major else (e, r, here)
                scale = regs.load(scales_ref.at[at], None if count == 1 else layout.reduce(1))
                y = values * regs.along_rows(scale, values.shape, layout) * inverse
                y = jnp.where(y > E4M3_MAX, E4M3_MAX, jnp.where(y < -E4M3_MAX, -E4M3_MAX, y))
                out_ref[e, r, here, :] = y.astype(FP8)

            for_pieces(move, column, groups, STEP)

        live = jnp.minimum(masked_m_ref[e], m)
        lax.fori_loop(0, lax.div(live - first + row_blocks - 1, row_blocks), row, None)

    # A reference is written in place: what no block writes stays.
    target = jax.new_ref(out.reshape(experts, m, groups, GROUP), memory_space=plgpu.GMEM)
    pl.kernel(
        requantise,
        (),
        mesh=plgpu.Mesh(grid=(experts, row_blocks, columns), grid_names=tuple(map(own, "erc"))),
        compiler_params=_PARAMS(unsafe_no_auto_barriers=True),
        interpret=interpreter() if interpret else False,
    )(
        x.reshape(experts, m, groups, GROUP),
        scales,
        masked_m,
        1.0 / output_scale.reshape(1),
        target,
    )
    return jax.freeze(target).reshape(out.shape)


def check(x, scales, masked_m, output_scale, out, mn_major: bool) -> None:
    if x.ndim != 3 or x.dtype != FP8 or x.shape[2] % GROUP:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be FP8 [E, M, H], H % 128 == 0")
    experts, m, width = x.shape
    if output_scale.size != 1:
        raise ValueError(f"output_scale is {list(output_scale.shape)}; it must be [] or [1]")
    groups = width // GROUP
    wanted = [("masked_m", masked_m, I32, (experts,)), ("out", out, FP8, x.shape)]
    if mn_major:
        columns = scales.shape[-1] if scales.ndim == 3 else m
        wanted.append(("scales", scales, F32, (experts, groups, max(m, columns))))
    else:
        wanted.append(("scales", scales, F32, (experts, m, groups)))
    wanted.append(("output_scale", output_scale, F32, output_scale.shape))
    for name, array, dtype, shape in wanted:
        if array.dtype != dtype:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be {jnp.dtype(dtype).name}")
        if array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}; it must be {list(shape)}")
