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

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform as host_platform
import re
import shutil
import struct
import tempfile
import threading
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np

from dgmoe_jax.platforms import only_on
from dgmoe_jax.tracing import vary_alike

_FP8 = "m_grouped_fp8_fp4_gemm_nt_contiguous"
_BF16 = "m_grouped_bf16_gemm_nt_contiguous"
_FP8_MASKED = "m_grouped_fp8_fp4_gemm_nt_masked"
_BF16_MASKED = "m_grouped_bf16_gemm_nt_masked"
_DENSE_FP8 = "fp8_fp4_gemm_nt"
_DENSE_BF16 = "bf16_gemm_nt"
_PRENORM = "tf32_hc_prenorm_gemm"
_K_FP8_NT = "k_grouped_fp8_gemm_nt_contiguous"
_K_FP8_TN = "k_grouped_fp8_gemm_tn_contiguous"
_K_BF16_TN = "k_grouped_bf16_gemm_tn_contiguous"


class _Function(typing.NamedTuple):
    """Parameters of a function of deep_gemm that a call gives; "a", "a_scales" are one pair there.

    tensors are in the order of ``_C``, attributes are integers, tuples of them or None.
    """

    tensors: tuple[str, ...]
    attributes: tuple[str, ...] = ()


_SCALED = ("a", "a_scales", "b", "b_scales")
_RECIPES = ("recipe", "recipe_a", "recipe_b", "disable_ue8m0_cast")
_FUNCTIONS = {
    _FP8: _Function((*_SCALED, "d", "grouped_layout"), _RECIPES),
    _BF16: _Function(("a", "b", "d", "grouped_layout")),
    _FP8_MASKED: _Function((*_SCALED, "d", "masked_m"), ("expected_m", *_RECIPES)),
    _BF16_MASKED: _Function(("a", "b", "d", "masked_m"), ("expected_m",)),
    _DENSE_FP8: _Function((*_SCALED, "d"), _RECIPES),
    _DENSE_BF16: _Function(("a", "b", "d")),
    _PRENORM: _Function(("a", "b", "d", "sqr_sum"), ("num_splits",)),
    _K_FP8_NT: _Function((*_SCALED, "d", "grouped_layout", "c"), ("ks", "recipe")),
    _K_FP8_TN: _Function((*_SCALED, "d", "grouped_layout", "c"), ("ks", "recipe")),
    _K_BF16_TN: _Function(("a", "b", "d", "grouped_layout", "c"), ("ks",)),
}
_RESULTS = ("d", "sqr_sum")
_SETTINGS = {  # getter and setter in _C; without a getter, the library's first value
    "alignment": (
        "get_mk_alignment_for_contiguous_layout",
        "set_mk_alignment_for_contiguous_layout",
        (),
    ),
    "num_sms": ("get_num_sms", "set_num_sms", ()),
    "pdl": ("get_pdl", "set_pdl", ()),
    "block_size_multiple_of": (None, "set_block_size_multiple_of", (1, 1)),
}
_TARGET, _EMULATED_TARGET = "dgmoe_", "dgmoe_emulated_"
_SCALE_GROUP = 128
_F32_SCALES = {"a": ((1, 128),), "b": ((128, 128),)}  # (rows, values along K) that share one
_UE8M0_SCALES = ((1, 128), (1, 32))
_GPU_ALIGNMENTS = (32, 64, 128)
_GPU_SLAB = 128  # rows that the masked kernels store at a time, at most
_PACKAGES = {  # import name -> what pip calls it
    "torch": "torch",
    "tvm_ffi": "apache-tvm-ffi",
    "jax_tvm_ffi": "jax-tvm-ffi",
    "deep_gemm": "sgl-deep-gemm",
    "ninja": "ninja",
}
_SHIM = pathlib.Path(__file__).with_name("shim.cpp")
_lock = threading.Lock()
_installed = set()
_refused = {}  # functions and settings that the installed wheel lacks -> the reason


@dataclasses.dataclass(frozen=True)
class Settings:
    """DeepGEMM's process-wide settings, for one call: set and restored under the launch's lock.

    None leaves the library's own value alone.

    num_sms: streaming multiprocessors that the kernel may use.
    pdl: programmatic dependent launch.
    block_size_multiple_of: tile sizes must be multiples of it, or of (M's, N's). The library has no
      getter for it: afterwards it is (1, 1), as at the start. Wheels before 0.2.0 lack it.
    """

    num_sms: int | None = None
    pdl: bool | None = None
    block_size_multiple_of: int | tuple[int, int] | None = None

    def __post_init__(self):
        if self.num_sms is not None:
            _check_integer("num_sms", self.num_sms, least=1)
        if not isinstance(self.pdl, (bool, type(None))):
            raise TypeError(f"pdl is {self.pdl!r}; it must be True, False or None")
        if self.block_size_multiple_of is not None:
            _check_integers("block_size_multiple_of", self._blocks(), 2, least=1)

    def _blocks(self):
        both = self.block_size_multiple_of
        return (both, both) if isinstance(both, int) else both

    def _values(self, alignment):
        """In the order of _SETTINGS, each a tuple of the setter's arguments."""
        single = (alignment, self.num_sms, self.pdl)
        return (*(() if v is None else (int(v),) for v in single), self._blocks() or ())


_UNSET = Settings()


def m_grouped_bf16_gemm_nt_contiguous(
    a, b, m_indices, *, alignment=128, settings=_UNSET, emulate=False
):
    """Grouped GEMM on bf16 rows: row r of the result is ``a[r] @ b[m_indices[r]].T``, f32 inside.

    Args:
      a: [M, K] bfloat16, K a multiple of 64. M = 0 is allowed.
      b: [E, N, K] bfloat16, N a multiple of 8.
      m_indices: [M] int32, the expert of each row, -1 for padding. All live rows of a block of
        ``alignment`` rows name the same expert and come first in the block.
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
    return _contiguous(_BF16, dict(a=a, b=b), m_indices, alignment, settings, emulate)


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
    settings=_UNSET,
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
    return _contiguous(_FP8, fp8, m_indices, alignment, settings, emulate, recipes)


def m_grouped_bf16_gemm_nt_masked(a, b, masked_m, expected_m, *, settings=_UNSET, emulate=False):
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
    return _masked(_BF16_MASKED, dict(a=a, b=b), masked_m, expected_m, settings, emulate)


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
    settings=_UNSET,
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
    return _masked(_FP8_MASKED, fp8, masked_m, expected_m, settings, emulate, recipes)


def gemm_nt_f8f8bf16(
    a,
    b,
    *,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    disable_ue8m0_cast=False,
    settings=_UNSET,
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
    return _call(_DENSE_FP8, fp8, results, recipes, **how)[0]


def gemm_nt_mxfp8_f8f8bf16(a, b, *, settings=_UNSET, emulate=False):
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


def gemm_nt_bf16bf16f32(a, b, *, settings=_UNSET, emulate=False):
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
    _check_rows(a, b[None], jnp.bfloat16, 64)
    results = dict(d=((a.shape[0], b.shape[0]), jnp.float32))
    operands = dict(a=a, b=b)
    return _call(_DENSE_BF16, operands, results, settings=settings, emulate=emulate)[0]


def tf32_hc_prenorm_gemm(a, b, *, num_splits=None, settings=_UNSET, emulate=False):
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
        _check_integer("num_splits", num_splits, least=1)
        if num_splits > depth // 64:
            raise ValueError(f"num_splits is {num_splits}; K = {depth} has {depth // 64} parts")
    needs = ("10", "sm_90 takes N up to 32") if columns > 32 else None
    splits = num_splits or 1
    shape = (splits, rows, columns)
    results = dict(d=(shape, jnp.float32), sqr_sum=(shape[:2], jnp.float32))
    attributes = dict(num_splits=splits)
    operands = dict(a=a, b=b)
    how = dict(settings=settings, emulate=emulate, needs=needs)
    d, sqr_sum = _call(_PRENORM, operands, results, attributes, **how)
    return (d[0], sqr_sum[0]) if num_splits is None else (d, sqr_sum)


def k_grouped_fp8_gemm_nt_contiguous(
    a, b, ks, c, *, recipe=(1, 1, 128), settings=_UNSET, emulate=False
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
    return _k_grouped(_K_FP8_NT, (a, b), ks, c, settings, emulate, dict(recipe=recipe), views)


def k_grouped_fp8_gemm_tn_contiguous(
    a, b, ks, c, *, recipe=(1, 1, 32), settings=_UNSET, emulate=False
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
    return _k_grouped(_K_FP8_TN, (a, b), ks, c, settings, emulate, dict(recipe=recipe))


def k_grouped_bf16_gemm_tn_contiguous(a, b, ks, c, *, settings=_UNSET, emulate=False):
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
    return _k_grouped(_K_BF16_TN, (a, b), ks, c, settings, emulate)


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
    settings=_UNSET,
    emulate=False,
):
    """The layer's GEMM step: FP8 when both scales are given, bf16 when both are None.

    a [M, K] and a_scales [slabs * K/128, S] lie in slabs, and masked_m is read, where m_indices is
    None; else contiguously, and m_indices [M] is read. Result [M, N]; the rest as above.
    """
    if (a_scales is None) != (b_scales is None):
        raise ValueError("a_scales and b_scales must both be given (FP8) or both be None (bf16)")
    fp8 = a_scales is not None
    how = dict(settings=settings, emulate=emulate)
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


def availability():
    """None when DeepGEMM can run here, else the reason as a sentence. Builds and imports nothing.

    Asks JAX for its default backend, so it starts JAX's backends if nothing has yet.
    """
    if jax.default_backend() != "gpu":
        return f"DeepGEMM needs a GPU, and JAX's default backend is {jax.default_backend()!r}"
    capability = _capability()
    if capability.split(".")[0] not in ("9", "10"):
        return f"DeepGEMM needs an sm_90 or sm_100 GPU, and this one has capability {capability}"
    return _missing_software(_PACKAGES)


def _capability():
    return str(getattr(jax.local_devices()[0], "compute_capability", None))


def _missing_software(packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(_PACKAGES[name] for name in missing)
        return f"DeepGEMM's bridge needs {', '.join(missing)}: pip install {names}"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        return f"DeepGEMM's bridge needs a C++ compiler, and there is no {compiler!r}: install g++"
    return None


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


def _check_integer(name, value, least):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}; it must be an int, known when tracing")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def _check_integers(name, values, count, least):
    if not isinstance(values, tuple) or len(values) != count:
        raise TypeError(f"{name} is {values!r}; it must be a tuple of {count} ints")
    for value in values:
        _check_integer(f"{name} {values}: {value!r}", value, least)


def _check_depth(depth, step):
    if depth == 0 or depth % step:
        raise ValueError(f"K is {depth}; it must be a positive multiple of {step}")


def _check_columns(experts, columns):
    if experts == 0 or columns == 0 or columns % 8:
        raise ValueError(
            f"b has E = {experts}, N = {columns}; E must be positive, N a positive multiple of 8"
        )


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
    _check_columns(experts, columns)


def _check_m_indices(m_indices, rows, alignment, emulate):
    _check("m_indices", m_indices, jnp.int32, (rows,))
    if emulate and (alignment <= 0 or alignment % 8):
        raise ValueError(f"alignment is {alignment}; the emulator takes positive multiples of 8")
    if not emulate and alignment not in _GPU_ALIGNMENTS:
        raise ValueError(f"alignment is {alignment}; DeepGEMM takes one of {_GPU_ALIGNMENTS}")


def _check_masked(a, b, masked_m, expected_m, emulate):
    _check_rank("a", a, "[E, M, K]")
    _check_rank("b", b, "[E, N, K]")
    experts, (_, rows, _) = b.shape[0], a.shape
    _check("a", a, a.dtype, (experts, *a.shape[1:]))
    _check("masked_m", masked_m, jnp.int32, (experts,))
    step = 8 if emulate else _GPU_SLAB
    if rows % step:
        raise ValueError(f"slabs have M = {rows} rows; M must be a multiple of {step}")
    _check_integer("expected_m", expected_m, least=0)


def _check_k_groups(ks, c, step):
    _check_rank("c", c, "[G, M, N]")
    _check("c", c, jnp.float32, c.shape)
    _check_integers("ks", ks, c.shape[0], least=0)
    if not ks or any(k % 128 for k in ks):
        raise ValueError(f"ks is {ks}; it must be groups of a multiple of 128")
    if any(size == 0 or size % step for size in c.shape[1:]):
        raise ValueError(f"c has shape {c.shape}; M and N must be positive multiples of {step}")


def _recipes(recipe, recipe_a, recipe_b, disable_ue8m0_cast):
    """The four attributes, checked as DeepGEMM does."""
    given = dict(recipe=recipe, recipe_a=recipe_a, recipe_b=recipe_b)
    for name, value in given.items():
        if value is not None:
            _check_integers(name, value, 3 if name == "recipe" else 2, least=1)
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
    _check_columns(b.shape[0], b.shape[-2])
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


_NEEDS_GPU = (
    "DeepGEMM needs a GPU; backend='xla' runs anywhere, backend='emulator' runs the same program"
    " on a CPU with an emulator in DeepGEMM's place"
)
_NEEDS_CPU = "the emulator of DeepGEMM reads host memory and runs on a CPU only"
_SCALES_OF = {  # dtype of the scales -> the GPU generation that reads them, what others read
    "float32": (
        "9",
        "for FP8 it wants packed UE8M0 scales (int32), not f32, and for weight gradients "
        "k_grouped_fp8_gemm_tn_contiguous; bf16 runs",
    ),
    "int32": (
        "10",
        "it has no UE8M0 scales, FP4 or groups of 32, but FP8 with f32 scales of recipe (1, 128, "
        "128), and for weight gradients k_grouped_fp8_gemm_nt_contiguous; bf16 runs",
    ),
}


def _contiguous(name, operands, m_indices, alignment, settings, emulate, attributes=None):
    (rows, _), (_, columns, _) = operands["a"].shape, operands["b"].shape
    # The FP8 kernel reads m_indices at every 64th row of a block, also past M.
    if rows % alignment:
        m_indices = jnp.pad(m_indices, (0, -rows % alignment), constant_values=-1)
    return _call(
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
    return _call(
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
    operands = dict(zip(_SCALED if attributes else "ab", jax.tree.leaves(pairs), strict=True))
    operands |= dict(grouped_layout=np.asarray(ks, np.int32), c=c)
    return _call(
        name,
        operands,
        dict(d=(c.shape, jnp.float32)),
        dict(ks=ks) | (attributes or {}),
        views=views,
        alignment=128,
        settings=settings,
        emulate=emulate,
    )[0]


class _Static(typing.NamedTuple):
    """What a call is, apart from its operands; hashable."""

    name: str
    target: str
    results: tuple  # (shape, dtype) of each
    views: tuple[int, ...]  # as shim.cpp's View takes them, operands first
    attributes: tuple  # in the order of the function's, then of _SETTINGS
    emulate: bool


def _call(
    name,
    operands,
    results,
    attributes=None,
    *,
    settings,
    emulate,
    views=None,
    alignment=None,
    needs=None,
):
    """The results, in order, of the function ``name``.

    operands and results ((shape, dtype) each) are named as in _FUNCTIONS, and so are attributes;
    views: see shim.cpp; alignment: None is left alone; needs: the GPU generation, and what others
    have instead, where not the scales decide it.
    """
    if not isinstance(settings, Settings):
        raise TypeError(f"settings is {settings!r}; it must be a deep_gemm.Settings")
    if any(0 in shape for shape, _ in results.values()):
        return [jnp.zeros(shape, dtype) for shape, dtype in results.values()]
    function, attributes = _FUNCTIONS[name], attributes or {}
    named = dict(zip(_SETTINGS, settings._values(alignment), strict=True))
    if emulate:
        _install("cpu")
    elif jax.default_backend() == "gpu":
        if "a_scales" in operands:
            needs = _SCALES_OF[jnp.dtype(operands["a_scales"].dtype).name]
        _check_gpu(needs)
        _install("gpu")
        for used in (name, *(setting for setting, value in named.items() if value)):
            if used in _refused:
                raise NotImplementedError(_refused[used])
    views, order = views or {}, (*_inputs(function), *results)
    static = _Static(
        name,
        (_EMULATED_TARGET if emulate else _TARGET) + name,
        tuple((shape, jnp.dtype(dtype).name) for shape, dtype in results.values()),
        tuple(views.get(tensor, -1) for tensor in order),
        (*(attributes.get(a) for a in function.attributes), *named.values()),
        emulate,
    )
    return _ffi_call([operands[tensor] for tensor in _inputs(function)], static)


def _inputs(function):
    return [tensor for tensor in function.tensors if tensor not in _RESULTS]


def _mn_major(operands):
    """Views of the scales of which each row of the values has its own."""
    if "a_scales" not in operands:
        return {}
    per_row = "ab" if operands["b_scales"].dtype == jnp.int32 else "a"
    return {f"{name}_scales": operands[name].shape[-2] for name in per_row}


def _check_gpu(needs):
    reason = availability()
    if reason is not None:
        raise NotImplementedError(reason)
    capability = _capability()
    if needs is not None and capability.split(".")[0] != needs[0]:
        raise NotImplementedError(
            f"this needs a GPU of capability {needs[0]}.x; this one has {capability}: {needs[1]}"
        )


@functools.partial(jax.jit, static_argnames="static", inline=True)
def _ffi_call(operands, static):
    function = _FUNCTIONS[static.name]
    *operands, last = vary_alike(*operands)
    last = only_on(last, *(("cpu", _NEEDS_CPU) if static.emulate else ("cuda", _NEEDS_GPU)))
    like = jax.typeof(last)
    results = [
        jax.ShapeDtypeStruct(
            shape, dtype, sharding=like.sharding, manual_axis_type=like.manual_axis_type
        )
        for shape, dtype in static.results
    ]
    names = (*function.attributes, *_SETTINGS)
    # DeepGEMM accumulates in place.
    accumulates = {len(operands): 0} if "c" in function.tensors else {}
    return jax.ffi.ffi_call(static.target, results, input_output_aliases=accumulates)(
        *operands,
        last,
        views=np.array(static.views),
        **{name: _encoded(v) for name, v in zip(names, static.attributes, strict=True)},
    )


def _encoded(value):
    """An integer, or an array: empty for None."""
    if isinstance(value, (int, np.integer)):
        return np.int64(value)
    return np.array(value or (), np.int64)


def _install(platform):
    """Builds the shim, gives it its functions and registers its targets; once per process."""
    with _lock:
        if platform in _installed:
            return
        if platform == "cpu":
            reason = emulator_availability()
            if reason is not None:
                raise NotImplementedError(reason)
        import tvm_ffi

        if platform == "gpu":
            # DeepGEMM reads it at its first GEMM.
            os.environ.setdefault("DG_JIT_CACHE_DIR", str(kernel_cache_dir()))
            import deep_gemm
            import torch

            # Before any stream guard: it brings up torch's side of the context that XLA uses.
            torch.cuda.init()
            templates = _templates(deep_gemm)
            cores = _cores(deep_gemm, jax.local_device_count())
            libraries = [_library(core, templates) for core in cores]
        else:
            libraries = [_emulated_library()]
        shim = tvm_ffi.load_module(str(_build_shim(platform)))
        for library in libraries:
            shim.install(*library)
        _register(shim, platform, _EMULATED_TARGET if platform == "cpu" else _TARGET)
        _installed.add(platform)


def _register(shim, platform, prefix):
    import jax_tvm_ffi

    for index, (name, function) in enumerate(_FUNCTIONS.items()):
        attributes = (*function.attributes, *_SETTINGS)
        jax_tvm_ffi.register_ffi_target(
            prefix + name,
            shim.target(index),
            arg_spec=["attrs.views", "args", "rets", *(f"attrs.{a}" for a in attributes)],
            platform=platform,
            # DeepGEMM's host side takes some 30 us a call, longer than a decode-sized GEMM
            # runs. Twenty (256, 1536, 2048) FP8 GEMMs in a program: 10 us each captured, 29
            # not; equal when the output buffers are new at every call. One function allocates
            # with torch, which must not happen in a capture.
            allow_cuda_graph=platform == "gpu" and name != _K_FP8_NT,
        )


def _library(core, templates):
    """What shim.cpp's Install takes: kernels and settings of one loaded copy of ``_C``."""
    kernels = [
        (getattr(core, name), *templates[name]) if name in templates else (None, [], [])
        for name in _FUNCTIONS
    ]
    settings = [
        (getattr(core, get or "", None), getattr(core, set_, None), initial)
        for get, set_, initial in _SETTINGS.values()
    ]
    return kernels, settings


def _emulated_library():
    """The same of the emulator: settings that hold values, and functions that read one of them."""
    import tvm_ffi

    from . import emulator

    state = {name: initial or (0,) for name, (_, _, initial) in _SETTINGS.items()}
    settings = []
    for name, (get, _, initial) in _SETTINGS.items():
        set_ = functools.partial(lambda name, *value: state.update({name: value}), name)
        get = get and tvm_ffi.convert(functools.partial(lambda name: state[name][0], name))
        settings.append((get, tvm_ffi.convert(set_), initial))

    def emulated(name, function):
        run = getattr(emulator, re.sub("(fp8_fp4|fp8|bf16)_", "", name))
        attributes = function.attributes

        def call(*args):
            count = len(args) - len(attributes)
            values = dict(zip(attributes, args[count:], strict=True))
            run(*args[:count], *_emulator_numbers(function, values, state["alignment"][0]))

        return tvm_ffi.convert(call)

    kernels = []
    for name, function in _FUNCTIONS.items():
        sources, defaults = _numbered(function, (*function.tensors, *function.attributes))
        kernels.append((emulated(name, function), sources, defaults))
    return kernels, settings


def _emulator_numbers(function, values, alignment):
    """The integers that follow the tensors of an emulated function."""
    if "ks" in values:
        numbers = [*values["ks"]]
    elif "grouped_layout" in function.tensors:
        numbers = [alignment]
    else:
        numbers = [values[name] for name in ("expected_m", "num_splits") if name in values]
    if "a_scales" in function.tensors:
        recipe = values["recipe"] or (1, 1, 128)
        both = (values.get("recipe_a") or recipe, values.get("recipe_b") or recipe)
        numbers += [granularity[-1] for granularity in both]
    return numbers


def _numbered(function, passed):
    """Sources and defaults, as shim.cpp's Kernel has them, of what is passed to a function.

    ``passed`` holds names of tensors and attributes, and constants in one-element lists.
    """
    results = [tensor for tensor in function.tensors if tensor in _RESULTS]
    order = (None, *_inputs(function), *results, *function.attributes)
    sources = [0 if isinstance(x, list) else order.index(x) for x in passed]
    return sources, [x[0] if isinstance(x, list) else None for x in passed]


def _templates(deep_gemm):
    """{name: (sources, defaults)} of the installed wheel's functions; fills _refused.

    ``_C`` takes positional arguments, and which there are differs between wheels: run the wheel's
    own Python wrapper with a stand-in for _C and see what it passes on.
    """
    templates = {}
    for name, function in _FUNCTIONS.items():
        try:
            templates[name] = _numbered(function, _passed_on(deep_gemm, name))
        except NotImplementedError as error:
            _refused[name] = str(error)
    for setting, (_, set_, _) in _SETTINGS.items():
        if getattr(deep_gemm._C, set_, None) is None:
            _refused[setting] = f"{setting}: this wheel of sgl-deep-gemm has no {set_}"
    return templates


def _passed_on(deep_gemm, name):
    """What a wrapper of deep_gemm passes to ``_C``: names of what is given, else [constant]."""
    wrapper, function = getattr(deep_gemm, name, None), _FUNCTIONS[name]
    if wrapper is None:
        raise NotImplementedError(f"this wheel of sgl-deep-gemm has no {name}")
    calls = []

    class StandIn:
        def __getattr__(self, called):
            return lambda *passed: calls.append((called, passed))

    probe = types.FunctionType(
        wrapper.__code__,
        {**wrapper.__globals__, "_C": StandIn()},
        wrapper.__name__,
        wrapper.__defaults__,
        wrapper.__closure__,
    )
    given = {x: object() for x in (*function.tensors, *function.attributes)}
    names = {id(x): name for name, x in given.items()}
    kwargs = {x: value for x, value in given.items() if not x.endswith("_scales")}
    for x in "ab":
        if f"{x}_scales" in given:
            kwargs[x] = (given[x], given[f"{x}_scales"])
    try:
        probe(**kwargs)
    except TypeError as error:  # a parameter of another name
        calls = [(error, ())]
    if len(calls) == 1 and calls[0][0] == name:
        passed = [names.get(id(x), [x]) for x in calls[0][1]]
        found = [x for x in passed if isinstance(x, str)]
        if [x for x in found if x in function.tensors] == [*function.tensors] and len(found) == len(
            given
        ):
            return passed
    raise NotImplementedError(
        f"deep_gemm.{name} does not call _C the way that sgl-deep-gemm 0.1.5 and 0.2.0 do; it made "
        f"the calls {calls}"
    )


def _cores(deep_gemm, count):
    """The loaded ``_C``, and copies of it for the other devices, where each has state of its own.

    Not run on two GPUs in this form (0.1.5 was, by hand, and gave right results on both); tests
    cover the symbol table and the shim's choice among stand-in libraries.
    """
    path = pathlib.Path(deep_gemm.__file__).with_name("_C.so")
    if count == 1 or _copies_share_state(path):
        return [deep_gemm._C]
    import tvm_ffi

    cores = [deep_gemm._C]
    cache = _cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    # The loader takes files of one inode for one library: each copy is a file, until it is loaded.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        for device in range(1, count):
            copy = shutil.copy(path, pathlib.Path(scratch, f"_C{device}.so"))
            cores.append(tvm_ffi.load_module(str(copy)))
            cores[-1].init(str(path.parent), deep_gemm.cuda_helpers.find_cuda_home())
    return cores


def _copies_share_state(path):
    """Whether the loader would bind the variables of all copies of a library to one of them.

    It does so for GNU-unique symbols. DeepGEMM's state are variables of its namespace, or of
    deep_jit; those inside of functions (_ZZ...) are but memos, such as the hash of its headers.
    A library whose symbols cannot be read counts as sharing.
    """
    try:
        unique = _unique_symbols(path.read_bytes())
    except (ValueError, struct.error):
        return True
    return any(re.match(r"_ZN(9deep_gemm|8deep_jit)", symbol) for symbol in unique)


def _unique_symbols(elf):
    """Names of the STB_GNU_UNIQUE symbols in the dynamic symbol table of a 64-bit ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a little-endian 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    # type, offset, size, link of each section
    sections = [struct.unpack_from("<4xI16xQQI", elf, table + i * size) for i in range(count)]
    dynamic = [section for section in sections if section[0] == 11]  # SHT_DYNSYM
    if not dynamic:
        raise ValueError("no dynamic symbol table")
    names = []
    for _, start, length, strings in dynamic:
        for name, info in struct.iter_unpack("<IB19x", elf[start : start + length]):
            if info >> 4 == 10:  # STB_GNU_UNIQUE
                begin = sections[strings][1] + name
                names.append(elf[begin : elf.index(b"\0", begin)].decode())
    return names


def _cache_dir():
    if chosen := os.environ.get("DGMOE_JAX_CACHE_DIR"):
        return pathlib.Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches) / "dgmoe_jax"


def _build_shim(platform):
    """Path of the compiled shim. Processes that build at once each build; the last rename stays."""
    import ninja
    import tvm_ffi.cpp

    flags = {"extra_cflags": ["-std=c++20"]}
    torch_version = None
    if platform == "gpu":
        import deep_gemm.cuda_helpers
        import torch

        torch_version = torch.__version__
        root = pathlib.Path(torch.__file__).parent
        abi = int(torch.compiled_with_cxx11_abi())
        flags["extra_cflags"] += ["-DDGMOE_CUDA", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        flags["extra_include_paths"] = [
            str(root / "include"),
            f"{deep_gemm.cuda_helpers.find_cuda_home()}/include",
        ]
        flags["extra_ldflags"] = [f"-L{root / 'lib'}", "-lc10", "-lc10_cuda"]
    identity = (
        _SHIM.read_text(),
        torch_version,
        importlib.metadata.version("apache-tvm-ffi"),
        host_platform.machine(),
        flags,
    )
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    library = _cache_dir() / f"shim_{platform}_{key}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # tvm_ffi looks for ninja on PATH, where it is not when Python runs from an inactive venv.
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((path, ninja.BIN_DIR))
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = tvm_ffi.cpp.build(
                "shim", sources=[str(_SHIM)], build_directory=scratch, **flags
            )
            os.replace(built, library)
    finally:
        os.environ["PATH"] = path
    return library


def emulator_availability():
    """None when the emulator's bridge can be built here, else the reason as a sentence."""
    return _missing_software(("tvm_ffi", "jax_tvm_ffi", "ninja"))


def kernel_cache_dir():
    """Where DeepGEMM keeps its compiled kernels, a folder ``cache/kernel.<name>.<hash>`` each.

    ``DG_JIT_CACHE_DIR``, else ``deep_gemm`` under ``DGMOE_JAX_CACHE_DIR``, so that one directory
    holds all that is compiled, else DeepGEMM's own ``~/.deep_gemm``.
    """
    if chosen := os.environ.get("DG_JIT_CACHE_DIR"):
        return pathlib.Path(chosen)
    if chosen := os.environ.get("DGMOE_JAX_CACHE_DIR"):
        return pathlib.Path(chosen) / "deep_gemm"
    return pathlib.Path.home() / ".deep_gemm"
