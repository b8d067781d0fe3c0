"""DeepGEMM's GEMMs inside ``jax.jit``: XLA FFI -> jax-tvm-ffi -> shim.cpp -> DeepGEMM.

Needs torch (DeepGEMM's host side), ``sgl-deep-gemm``, ``jax-tvm-ffi``, ``apache-tvm-ffi``, ninja
and a C++ compiler on the machine that runs it; all are imported when a GPU is first used. Wheels
of sgl-deep-gemm up to 0.1.5 go with torch 2.11, later ones with torch 2.13: beside the wrong torch
they fail with "dim == 2 or dim == 3".

One process drives all its GPUs where copies of the wheel's ``_C.so`` are independent (0.1.5), each
GPU with a copy of its own. Where copies share their state (0.2.0), it drives one, and a call on
another raises RuntimeError: use one process per GPU.

The shim is compiled once for each machine and kept under ``DGMOE_JAX_CACHE_DIR``, else
``XDG_CACHE_HOME/dgmoe_jax``, else ``~/.cache/dgmoe_jax``.

Scales. Matrices with a scale per row are given as DeepGEMM reads them, MN-major and TMA-aligned:
row-major here as [groups along K, MN rounded up to 4], of which DeepGEMM sees the transposed view.
f32 scales go with SM90: ``(1, 128)`` for a and ``(128, 128)`` for b, the latter plainly as
[ceil(N/128), K/128]. int32 scales go with SM100, for a and b alike: four UE8M0 exponents along K in
each, ``(1, 128)`` or ``(1, 32)``, so that [groups along K] is ceil(K/512) or ceil(K/128). f32
scales are not taken there: DeepGEMM would drop their mantissas without a word.

Recipes mean what they mean in DeepGEMM: ``recipe`` is (rows of a, rows of b, values along K) that
share a scale, or ``recipe_a`` and ``recipe_b`` are (rows, values along K) each. None of them: (1,
128, 128) where the scales of b are f32, (1, 1, 128) where they are int32.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .bridge import (
    SCALED,
    UNSET,
    Settings,
    availability,
    call,
    check_integer,
    check_integers,
    emulator_availability,
    kernel_cache_dir,
)

__all__ = [
    "Settings",
    "availability",
    "emulator_availability",
    "gemm",
    "gemm_nt_bf16bf16f32",
    "gemm_nt_f8f8bf16",
    "gemm_nt_mxfp8_f8f8bf16",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "kernel_cache_dir",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "tf32_hc_prenorm_gemm",
]

_SCALE_GROUP = 128
_F32_SCALES = {"a": ((1, 128),), "b": ((128, 128),)}  # (rows, values along K) that share one
_UE8M0_SCALES = ((1, 128), (1, 32))
_GPU_ALIGNMENTS = (32, 64, 128)
_GPU_SLAB = 128  # rows that the masked kernels store at a time, at most


def m_grouped_bf16_gemm_nt_contiguous(
    a, b, m_indices, *, alignment=128, settings=UNSET, emulate=False
):
    """Grouped GEMM on bf16 rows: row r of the result is ``a[r] @ b[m_indices[r]].T``, f32 inside.

    Args:
      a: [M, K] bfloat16, K a multiple of 64. M = 0 is allowed.
      b: [E, N, K] bfloat16, N a multiple of 8.
      m_indices: [M] int32, the expert of each row, -1 for padding. All live rows of a block of
        ``alignment`` rows name the same expert and come first in the block: a numpy array is
        checked for that, of what is on a device DeepGEMM reads one row in 64.
      alignment: rows in a block: 32, 64 or 128; with ``emulate`` any multiple of 8.
      settings: Settings of this call.
      emulate: run the same chain on a CPU, with a numpy emulator in DeepGEMM's place.

    Returns:
      [M, N] bfloat16. Rows whose m_indices is -1 are unspecified.

    Raises:
      TypeError, ValueError: a dtype, shape, recipe or alignment that the kernel cannot take.
      NotImplementedError: DeepGEMM or this GPU cannot run it; the text says what is available.
    """
    _check_rows(a, b, jnp.bfloat16, 64)
    _check_m_indices(m_indices, a.shape[0], alignment, emulate)
    return _contiguous(
        "m_grouped_bf16_gemm_nt_contiguous", dict(a=a, b=b), m_indices, alignment, settings, emulate
    )


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a,
    b,
    m_indices,
    *,
    alignment=128,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    disable_ue8m0_cast=False,
    settings=UNSET,
    emulate=False,
):
    """Grouped GEMM on rows with scales; otherwise as the bf16 one.

    Args:
      a: pair of values [M, K] float8_e4m3fn (or FP4, as of b), K a multiple of 128, and scales:
        [K/128, M4] float32 or [ceil(K/512) or ceil(K/128), M4] int32, M4 = M rounded up to 4.
        Columns past M are never used.
      b: pair of values [E, N, K] float8_e4m3fn, or [E, N, K/2] int8 or uint8: FP4, the low nibble
        first along K; N a multiple of 8; and scales: [E, ceil(N/128), K/128] float32, one per
        128 x 128 block, or [E, ceil(K/512) or ceil(K/128), N4] int32.
      m_indices, alignment, settings, emulate: as for bf16.
      recipe, recipe_a, recipe_b: what shares a scale, as the module says.
      disable_ue8m0_cast: handed to DeepGEMM, which casts nothing of what is taken here.

    Returns, raises: as the bf16 one.
    """
    _check_m_indices(m_indices, a[0].shape[0], alignment, emulate)
    recipes = _recipes(recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    fp8 = _scaled(a, b, recipes, grouped=True)
    return _contiguous(
        "m_grouped_fp8_fp4_gemm_nt_contiguous",
        fp8,
        m_indices,
        alignment,
        settings,
        emulate,
        recipes,
    )


def m_grouped_bf16_gemm_nt_masked(a, b, masked_m, expected_m, *, settings=UNSET, emulate=False):
    """Grouped GEMM on slabs of bf16 rows: ``a[e] @ b[e].T`` on the first masked_m[e] rows.

    Args:
      a: [E, M, K] bfloat16, K a multiple of 64, M of 128 (with ``emulate`` of 8). The kernels store
        whole blocks, so that the rest of a block beyond masked_m[e] is overwritten.
      b: [E, N, K] bfloat16, N a multiple of 8.
      masked_m: [E] int32, at most M each.
      expected_m: int, the mean of masked_m that DeepGEMM chooses its kernel by; never a limit.
      settings, emulate: as of m_grouped_bf16_gemm_nt_contiguous.

    Returns:
      [E, M, N] bfloat16. Rows from masked_m[e] on are unspecified.

    Raises:
      TypeError, ValueError: a dtype, shape or recipe that the kernel cannot take.
      NotImplementedError: DeepGEMM or this GPU cannot run it; the text says what is available.
    """
    _check_rows(a, b, jnp.bfloat16, 64)
    _check_masked(a, b, masked_m, expected_m, emulate)
    return _masked(
        "m_grouped_bf16_gemm_nt_masked", dict(a=a, b=b), masked_m, expected_m, settings, emulate
    )


def m_grouped_fp8_fp4_gemm_nt_masked(
    a,
    b,
    masked_m,
    expected_m,
    *,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    disable_ue8m0_cast=False,
    settings=UNSET,
    emulate=False,
):
    """Grouped GEMM on slabs of rows with scales; otherwise as the bf16 one.

    Args:
      a: pair of values [E, M, K] and scales [E, groups along K, M4], else as of
        m_grouped_fp8_fp4_gemm_nt_contiguous, and so are b and the recipes.
      masked_m, expected_m, settings, emulate: as for bf16.

    Returns, raises: as the bf16 one.
    """
    _check_masked(a[0], b[0], masked_m, expected_m, emulate)
    recipes = _recipes(recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    fp8 = _scaled(a, b, recipes, grouped=True)
    return _masked(
        "m_grouped_fp8_fp4_gemm_nt_masked", fp8, masked_m, expected_m, settings, emulate, recipes
    )


def gemm_nt_f8f8bf16(
    a,
    b,
    *,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    disable_ue8m0_cast=False,
    settings=UNSET,
    emulate=False,
):
    """``a @ b.T`` on rows with scales, by DeepGEMM's fp8_gemm_nt (fp8_fp4_gemm_nt).

    Args:
      a: pair of values [M, K] and scales, as of m_grouped_fp8_fp4_gemm_nt_contiguous. M = 0 is
        allowed.
      b: the same without E: values [N, K] (FP4: [N, K/2]) and scales [ceil(N/128), K/128] float32
        or [ceil(K/512) or ceil(K/128), N4] int32.
      recipe, recipe_a, recipe_b, disable_ue8m0_cast, settings, emulate: as there.

    Returns:
      [M, N] bfloat16.

    Raises:
      TypeError, ValueError: a dtype, shape or recipe that the kernel cannot take.
      NotImplementedError: DeepGEMM or this GPU cannot run it; the text says what is available.
    """
    recipes = _recipes(recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    fp8 = _scaled(a, b, recipes, grouped=False)
    results = dict(d=((a[0].shape[0], b[0].shape[0]), jnp.bfloat16))
    how = dict(views=_mn_major(fp8), settings=settings, emulate=emulate)
    return call("fp8_fp4_gemm_nt", fp8, results, recipes, **how)[0]


def gemm_nt_mxfp8_f8f8bf16(a, b, *, settings=UNSET, emulate=False):
    """``a @ b.T`` on MXFP8: one UE8M0 scale per row and 32 values on both sides. Needs SM100.

    Args:
      a: pair of values [M, K] float8_e4m3fn, K a multiple of 128, and scales [K/128, M4] int32,
        M4 = M rounded up to 4.
      b: pair of values [N, K] float8_e4m3fn, N a multiple of 8, and scales [K/128, N4] int32.
      settings, emulate: as of m_grouped_bf16_gemm_nt_contiguous.

    Returns, raises: as gemm_nt_f8f8bf16.
    """
    for name, (values, scales) in (("a", a), ("b", b)):
        _check_dtype(name, values, jnp.float8_e4m3fn)
        _check_dtype(f"scales of {name}", scales, jnp.int32)
    recipes = dict(recipe_a=(1, 32), recipe_b=(1, 32), disable_ue8m0_cast=True)
    return gemm_nt_f8f8bf16(a, b, **recipes, settings=settings, emulate=emulate)


def gemm_nt_bf16bf16f32(a, b, *, settings=UNSET, emulate=False):
    """``a @ b.T`` of bf16 matrices in f32, unrounded, by DeepGEMM's bf16_gemm_nt.

    Args:
      a: [M, K] bfloat16, K a multiple of 64. M = 0 is allowed.
      b: [N, K] bfloat16, N a multiple of 8.
      settings, emulate: as of m_grouped_bf16_gemm_nt_contiguous.

    Returns:
      [M, N] float32.

    Raises:
      TypeError, ValueError: a dtype or shape that the kernel cannot take.
      NotImplementedError: DeepGEMM or this GPU cannot run it; the text says what is available.
    """
    _check_rank("a", a, "[M, K]")
    _check_rank("b", b, "[N, K]")
    depth, columns = a.shape[1], b.shape[0]
    _check_dtype("a", a, jnp.bfloat16)
    _check("b", b, jnp.bfloat16, (columns, depth))
    _check_depth(depth, 64)
    _check_columns(columns)
    results = dict(d=((a.shape[0], b.shape[0]), jnp.float32))
    operands = dict(a=a, b=b)
    return call("bf16_gemm_nt", operands, results, settings=settings, emulate=emulate)[0]


def tf32_hc_prenorm_gemm(a, b, *, num_splits=None, settings=UNSET, emulate=False):
    """``a @ b.T`` and the sums of squares of a's rows in one pass, TF32 with f32 sums.

    Args:
      a: [M, K] bfloat16, K a multiple of 64. M = 0 is allowed.
      b: [N, K] float32, N a multiple of 8, at most 32 on SM90 and 128 on SM100.
      num_splits: parts of K, of at least 64 values each, whose sums are returned apart.
      settings, emulate: as of m_grouped_bf16_gemm_nt_contiguous.

    Returns:
      d [M, N] and sqr_sum [M], both float32; with num_splits [num_splits, M, N] and
      [num_splits, M], to be added up by the caller.

    Raises: as gemm_nt_bf16bf16f32.
    """
    _check_rank("a", a, "[M, K]")
    _check_rank("b", b, "[N, K]")
    (rows, depth), columns = a.shape, b.shape[0]
    _check("a", a, jnp.bfloat16, (rows, depth))
    _check("b", b, jnp.float32, (columns, depth))
    _check_depth(depth, 64)
    if columns == 0 or columns % 8 or columns > 128:
        raise ValueError(f"b has N = {columns}; N must be a multiple of 8, from 8 to 128")
    if num_splits is not None:
        check_integer("num_splits", num_splits, least=1)
        if num_splits > depth // 64:
            raise ValueError(f"num_splits is {num_splits}; K = {depth} has {depth // 64} parts")
    needs = ("10", "sm_90 takes N up to 32") if columns > 32 else None
    splits = num_splits or 1
    shape = (splits, rows, columns)
    results = dict(d=(shape, jnp.float32), sqr_sum=(shape[:2], jnp.float32))
    attributes = dict(num_splits=splits)
    operands = dict(a=a, b=b)
    how = dict(settings=settings, emulate=emulate, needs=needs)
    d, sqr_sum = call("tf32_hc_prenorm_gemm", operands, results, attributes, **how)
    return (d[0], sqr_sum[0]) if num_splits is None else (d, sqr_sum)


def k_grouped_fp8_gemm_nt_contiguous(
    a, b, ks, c, *, recipe=(1, 1, 128), settings=UNSET, emulate=False
):
    """Weight gradients in FP8: ``c[g] + a_g @ b_g.T``, group g with ks[g] of the sum along K. SM90.

    Args:
      a: pair of values [sum(ks) * M] float8_e4m3fn, each group's [M, ks[g]] after the one before,
        and scales [sum(ks)/128, M] float32, one per row and 128 values.
      b: the same with N for M.
      ks: ints, known when tracing, each a multiple of 128; 0 is allowed.
      c: [G, M, N] float32, M and N multiples of 4; the result takes its memory where c is not
        needed any more.
      recipe: (1, 1, 128).
      settings, emulate: as of m_grouped_bf16_gemm_nt_contiguous.

    Returns:
      [G, M, N] float32.

    Raises: as gemm_nt_bf16bf16f32. DeepGEMM allocates some kilobytes with torch in this function,
    and in no other.
    """
    _check_k_groups(ks, c, 4)
    if recipe != (1, 1, 128):
        raise ValueError(f"recipe is {recipe}; it must be (1, 1, 128)")
    depth, views = sum(ks), {}
    for name, (values, scales), size in (("a", a, c.shape[1]), ("b", b, c.shape[2])):
        _check(name, values, jnp.float8_e4m3fn, (depth * size,))
        _check(f"scales of {name}", scales, jnp.float32, (depth // _SCALE_GROUP, size))
        views[f"{name}_scales"] = size
    return _k_grouped(
        "k_grouped_fp8_gemm_nt_contiguous",
        (a, b),
        ks,
        c,
        settings,
        emulate,
        dict(recipe=recipe),
        views,
    )


def k_grouped_fp8_gemm_tn_contiguous(
    a, b, ks, c, *, recipe=(1, 1, 32), settings=UNSET, emulate=False
):
    """Weight gradients in FP8: ``c[g] + a_g.T @ b_g``, group g with ks[g] rows of a and b. SM100.

    Args:
      a: pair of values [sum(ks), M] float8_e4m3fn, M a multiple of 16, and scales [sum(ks)/128, M]
        int32, four UE8M0 exponents along K in each, one per column and 32 values.
      b: the same with N for M.
      ks, c, settings, emulate: as of k_grouped_fp8_gemm_nt_contiguous.
      recipe: (1, 1, 32). DeepGEMM takes (1, 1, 128) with f32 scales only, which it would cast.

    Returns, raises: as gemm_nt_bf16bf16f32, [G, M, N].
    """
    _check_k_groups(ks, c, 16)
    if recipe != (1, 1, 32):
        raise ValueError(f"recipe is {recipe}; it must be (1, 1, 32)")
    depth = sum(ks)
    for name, (values, scales), size in (("a", a, c.shape[1]), ("b", b, c.shape[2])):
        _check(name, values, jnp.float8_e4m3fn, (depth, size))
        _check(f"scales of {name}", scales, jnp.int32, (depth // 128, size))
    return _k_grouped(
        "k_grouped_fp8_gemm_tn_contiguous", (a, b), ks, c, settings, emulate, dict(recipe=recipe)
    )


def k_grouped_bf16_gemm_tn_contiguous(a, b, ks, c, *, settings=UNSET, emulate=False):
    """Weight gradients in bf16: ``c[g] + a_g.T @ b_g``, group g with ks[g] rows of a and b.

    Args:
      a: [sum(ks), M] bfloat16, M a multiple of 8.
      b: [sum(ks), N] bfloat16, N a multiple of 8.
      ks, c, settings, emulate: as of k_grouped_fp8_gemm_nt_contiguous.

    Returns, raises: as gemm_nt_bf16bf16f32, [G, M, N].
    """
    _check_k_groups(ks, c, 8)
    for name, values, size in (("a", a, c.shape[1]), ("b", b, c.shape[2])):
        _check(name, values, jnp.bfloat16, (sum(ks), size))
    return _k_grouped("k_grouped_bf16_gemm_tn_contiguous", (a, b), ks, c, settings, emulate)


def gemm(
    a,
    a_scales,
    b,
    b_scales,
    tiles,
    m_indices,
    masked_m,
    *,
    alignment,
    tile,
    slabs,
    expected_m,
    recipe_a=None,
    recipe_b=None,
    settings=UNSET,
    emulate=False,
):
    """The layer's GEMM step: with scales when both are given, bf16 when both are None.

    a [M, K] and a_scales [slabs * groups along K, S] lie in slabs, and masked_m is read, where
    m_indices is None; else contiguously, and m_indices [M] is read. Result [M, N]; the rest as
    above.
    """
    if (a_scales is None) != (b_scales is None):
        raise ValueError("a_scales and b_scales must both be given (FP8) or both be None (bf16)")
    fp8 = a_scales is not None
    how = dict(settings=settings, emulate=emulate)
    if fp8:
        how |= dict(recipe_a=recipe_a, recipe_b=recipe_b)
    if m_indices is not None:
        function = (
            m_grouped_fp8_fp4_gemm_nt_contiguous if fp8 else m_grouped_bf16_gemm_nt_contiguous
        )
        a, b = ((a, a_scales), (b, b_scales)) if fp8 else (a, b)
        return function(a, b, m_indices, alignment=alignment, **how)
    function = m_grouped_fp8_fp4_gemm_nt_masked if fp8 else m_grouped_bf16_gemm_nt_masked
    rows = a.shape[0]
    a = a.reshape(slabs, rows // slabs, a.shape[1])
    if fp8:
        a, b = (a, a_scales.reshape(slabs, -1, a_scales.shape[1])), (b, b_scales)
    return function(a, b, masked_m, expected_m, **how).reshape(rows, -1)


def _check_dtype(name, array, dtype):
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {jnp.dtype(dtype).name}")


def _check(name, array, dtype, shape):
    _check_dtype(name, array, dtype)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")


def _check_rank(name, array, dimensions):
    if array.ndim != len(dimensions.split(",")):
        raise ValueError(f"{name} has shape {array.shape}; it must be {dimensions}")


def _check_depth(depth, step):
    if depth == 0 or depth % step:
        raise ValueError(f"K is {depth}; it must be a positive multiple of {step}")


def _check_columns(columns, experts=1):
    if experts == 0:
        raise ValueError(f"b has E = {experts}; E must be positive")
    if columns == 0 or columns % 8:
        raise ValueError(f"b has N = {columns}; N must be a positive multiple of 8")


def _check_rows(a, b, dtype, depth_step):
    """a is [M, K] or, in slabs, [E, M, K]; b is [E, N, K]."""
    if a.ndim not in (2, 3) or b.ndim != 3:
        raise ValueError(
            f"a must be [M, K] or [E, M, K], b [E, N, K]; their shapes are {a.shape}, {b.shape}"
        )
    depth, (experts, columns, _) = a.shape[-1], b.shape
    _check("a", a, dtype, (*((experts,) if a.ndim == 3 else ()), *a.shape[-2:]))
    _check("b", b, dtype, (experts, columns, depth))
    _check_depth(depth, depth_step)
    _check_columns(columns, experts)


def _check_m_indices(m_indices, rows, alignment, emulate):
    _check("m_indices", m_indices, jnp.int32, (rows,))
    if emulate and (alignment <= 0 or alignment % 8):
        raise ValueError(f"alignment is {alignment}; the emulator takes positive multiples of 8")
    if not emulate and alignment not in _GPU_ALIGNMENTS:
        raise ValueError(f"alignment is {alignment}; DeepGEMM takes one of {_GPU_ALIGNMENTS}")
    if isinstance(m_indices, np.ndarray):
        _check_blocks(m_indices, alignment)


def _check_blocks(m_indices, alignment):
    # A row may differ from the one before it at the start of a block, or by being padding.
    (starts,) = np.nonzero((m_indices[1:] != m_indices[:-1]) & (m_indices[1:] >= 0))
    wrong = starts[(starts + 1) % alignment != 0] + 1
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"m_indices[{row}] is {m_indices[row]} after {m_indices[row - 1]}; another expert must "
            f"start at a multiple of alignment = {alignment}"
        )


def _check_masked(a, b, masked_m, expected_m, emulate):
    _check_rank("a", a, "[E, M, K]")
    _check_rank("b", b, "[E, N, K]")
    experts, (_, rows, _) = b.shape[0], a.shape
    _check("a", a, a.dtype, (experts, *a.shape[1:]))
    _check("masked_m", masked_m, jnp.int32, (experts,))
    step = 8 if emulate else _GPU_SLAB
    if rows % step:
        raise ValueError(f"slabs have M = {rows} rows; M must be a multiple of {step}")
    check_integer("expected_m", expected_m, least=0)


def _check_k_groups(ks, c, step):
    _check_rank("c", c, "[G, M, N]")
    _check("c", c, jnp.float32, c.shape)
    check_integers("ks", ks, c.shape[0], least=0)
    if not ks or any(k % 128 for k in ks):
        raise ValueError(f"ks is {ks}; it must be groups of a multiple of 128")
    if any(size == 0 or size % step for size in c.shape[1:]):
        raise ValueError(f"c has shape {c.shape}; M and N must be positive multiples of {step}")


def _recipes(recipe, recipe_a, recipe_b, disable_ue8m0_cast):
    """The four attributes, checked as DeepGEMM does."""
    given = dict(recipe=recipe, recipe_a=recipe_a, recipe_b=recipe_b)
    for name, value in given.items():
        if value is not None:
            check_integers(name, value, 3 if name == "recipe" else 2, least=1)
    if (recipe_a is None) != (recipe_b is None) or (recipe is not None and recipe_a is not None):
        raise ValueError(f"{given}: give recipe, or recipe_a and recipe_b, or none of them")
    return given | dict(disable_ue8m0_cast=bool(disable_ue8m0_cast))


def _scaled(a, b, recipes, *, grouped):
    """The operands of ``a @ b.T``, checked against what their scales are made for."""
    (a, a_scales), (b, b_scales) = a, b
    if grouped:
        _check_rank("b", b, "[E, N, K]")
    else:
        _check_rank("a", a, "[M, K]")
        _check_rank("b", b, "[N, K]")
    if {a_scales.dtype, b_scales.dtype} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}:
        raise TypeError(
            f"scales of a are {a_scales.dtype}, of b {b_scales.dtype}; they must be both float32 "
            "(SM90) or both int32, four UE8M0 exponents each (SM100)"
        )
    packed = a_scales.dtype == jnp.int32
    if recipes["recipe_a"] is not None:
        gran_a, gran_b = recipes["recipe_a"], recipes["recipe_b"]
    else:
        rows_a, rows_b, gran_k = recipes["recipe"] or ((1, 1, 128) if packed else (1, 128, 128))
        gran_a, gran_b = (rows_a, gran_k), (rows_b, gran_k)
    depth = _check_scaled("a", a, a_scales, gran_a)
    if _check_scaled("b", b, b_scales, gran_b) != depth:
        raise ValueError(f"b has shape {b.shape}; it must be {(*b.shape[:-1], depth)}")
    _check_columns(b.shape[-2], *b.shape[:-2])
    return dict(a=_int8(a), a_scales=a_scales, b=_int8(b), b_scales=b_scales)


def _is_fp4(values):
    return values.dtype in (jnp.int8, jnp.uint8)


def _int8(values):
    """FP4 is int8 in DeepGEMM."""
    return jax.lax.bitcast_convert_type(values, jnp.int8) if values.dtype == jnp.uint8 else values


def _check_scaled(name, values, scales, granularity):
    """K of an operand [..., MN, K] (FP4: K/2) whose scales fit ``granularity``."""
    *stack, size, depth = values.shape
    if _is_fp4(values):
        depth *= 2
    else:
        _check_dtype(name, values, jnp.float8_e4m3fn)
    _check_depth(depth, _SCALE_GROUP)
    packed = scales.dtype == jnp.int32
    if not packed:
        _check_dtype(f"scales of {name}", scales, jnp.float32)
        if _is_fp4(values):
            raise TypeError(f"scales of {name} are float32; FP4 values have int32 scales")
    allowed = _UE8M0_SCALES if packed else _F32_SCALES[name]
    if granularity not in allowed:
        raise ValueError(
            f"the recipe of {name} is {granularity}; with {scales.dtype} scales it must be "
            f"{' or '.join(map(str, allowed))}"
        )
    groups = -(-depth // (granularity[1] * (4 if packed else 1)))
    shape = (groups, -(-size // 4) * 4)
    if granularity[0] > 1:
        shape = (-(-size // granularity[0]), groups)
    _check(f"scales of {name}", scales, scales.dtype, (*stack, *shape))
    return depth


def _contiguous(name, operands, m_indices, alignment, settings, emulate, attributes=None):
    (rows, _), (_, columns, _) = operands["a"].shape, operands["b"].shape
    # The FP8 kernel reads m_indices at every 64th row of a block, also past M.
    if rows % alignment:
        m_indices = jnp.pad(m_indices, (0, -rows % alignment), constant_values=-1)
    return call(
        name,
        operands | dict(grouped_layout=m_indices),
        dict(d=((rows, columns), jnp.bfloat16)),
        attributes,
        views=_mn_major(operands) | dict(grouped_layout=rows),
        alignment=alignment,
        settings=settings,
        emulate=emulate,
    )[0]


def _masked(name, operands, masked_m, expected_m, settings, emulate, attributes=None):
    (experts, rows, _), (_, columns, _) = operands["a"].shape, operands["b"].shape
    return call(
        name,
        operands | dict(masked_m=masked_m),
        dict(d=((experts, rows, columns), jnp.bfloat16)),
        # DeepGEMM refuses 0.
        dict(expected_m=max(1, expected_m)) | (attributes or {}),
        views=_mn_major(operands),
        settings=settings,
        emulate=emulate,
    )[0]


def _k_grouped(name, pairs, ks, c, settings, emulate, attributes=None, views=None):
    if not sum(ks):
        return jnp.asarray(c)
    operands = dict(zip(SCALED if attributes else "ab", jax.tree.leaves(pairs), strict=True))
    operands |= dict(grouped_layout=np.asarray(ks, np.int32), c=c)
    return call(
        name,
        operands,
        dict(d=(c.shape, jnp.float32)),
        dict(ks=ks) | (attributes or {}),
        views=views,
        alignment=128,
        settings=settings,
        emulate=emulate,
    )[0]


def _mn_major(operands):
    """Views of the scales of which each row of the values has its own."""
    if "a_scales" not in operands:
        return {}
    per_row = "ab" if operands["b_scales"].dtype == jnp.int32 else "a"
    return {f"{name}_scales": operands[name].shape[-2] for name in per_row}
