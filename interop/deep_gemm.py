"""DeepGEMM's grouped GEMMs inside ``jax.jit``: XLA FFI -> jax-tvm-ffi -> shim.cpp -> DeepGEMM.

Needs torch (DeepGEMM's host side), ``sgl-deep-gemm``, ``jax-tvm-ffi``, ``apache-tvm-ffi``, ninja
and a C++ compiler on the machine that runs it; all are imported when a GPU is first used. Wheels
of sgl-deep-gemm up to 0.1.5 go with torch 2.11, later ones with torch 2.13: beside the wrong torch
they fail with "dim == 2 or dim == 3". One process drives one GPU.

The shim is compiled once for each machine and kept under ``DGMOE_JAX_CACHE_DIR``, else
``XDG_CACHE_HOME/dgmoe_jax``, else ``~/.cache/dgmoe_jax``.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform as host_platform
import shutil
import tempfile
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np

from dgmoe_jax.platforms import only_on
from dgmoe_jax.tracing import vary_alike

_FP8 = "m_grouped_fp8_fp4_gemm_nt_contiguous"
_BF16 = "m_grouped_bf16_gemm_nt_contiguous"
_FP8_MASKED = "m_grouped_fp8_fp4_gemm_nt_masked"
_BF16_MASKED = "m_grouped_bf16_gemm_nt_masked"
_TENSORS = {  # of each function of DeepGEMM's _C, in its order
    _FP8: ("a", "a_scales", "b", "b_scales", "d", "m_indices"),
    _BF16: ("a", "b", "d", "m_indices"),
    _FP8_MASKED: ("a", "a_scales", "b", "b_scales", "d", "masked_m"),
    _BF16_MASKED: ("a", "b", "d", "masked_m"),
}
_TARGET, _EMULATED_TARGET = "dgmoe_", "dgmoe_emulated_"
_SCALE_GROUP = 128
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


def m_grouped_bf16_gemm_nt_contiguous(a, b, m_indices, *, alignment=128, emulate=False):
    """Grouped GEMM on bf16 rows: row r of the result is ``a[r] @ b[m_indices[r]].T``, f32 inside.

    Args:
      a: [M, K] bfloat16, K a multiple of 64. M = 0 is allowed.
      b: [E, N, K] bfloat16, N a multiple of 8.
      m_indices: [M] int32, the expert of each row, -1 for padding. All live rows of a block of
        ``alignment`` rows name the same expert and come first in the block.
      alignment: rows in a block: 32, 64 or 128; with ``emulate`` any multiple of 8.
      emulate: run the same chain on a CPU, with a numpy emulator in DeepGEMM's place.

    Returns:
      [M, N] bfloat16. Rows whose m_indices is -1 are unspecified.

    Raises:
      TypeError, ValueError: a dtype, shape or alignment that the kernel cannot take.
      NotImplementedError: DeepGEMM cannot run here; the text says what is missing.
    """
    _check_rows(a, b, jnp.bfloat16, 64)
    _check_m_indices(m_indices, a.shape[0], alignment, emulate)
    return _contiguous((a, b), m_indices, name=_BF16, alignment=alignment, emulate=emulate)


def m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, m_indices, *, alignment=128, emulate=False):
    """Grouped GEMM on FP8 rows with f32 scales; otherwise as the bf16 one. Needs an SM90 GPU.

    Args:
      a: pair of values [M, K] float8_e4m3fn, K a multiple of 128, and scales [K/128, M4] float32,
        M4 = M rounded up to 4. One scale per row and 128 values; columns past M are never used.
        DeepGEMM sees the transposed view: shape (M, K/128), strides (1, M4).
      b: pair of values [E, N, K] float8_e4m3fn, N a multiple of 8, and scales
        [E, ceil(N/128), K/128] float32, one per 128 x 128 block.
      m_indices, alignment, emulate: as for bf16.

    Returns:
      [M, N] bfloat16. Rows whose m_indices is -1 are unspecified.

    Raises:
      TypeError, ValueError: a dtype, shape or alignment that the kernel cannot take.
      NotImplementedError: DeepGEMM cannot run here; the text says what is missing.
    """
    (a, a_scales), (b, b_scales) = a, b
    _check_rows(a, b, jnp.float8_e4m3fn, _SCALE_GROUP)
    _check_m_indices(m_indices, a.shape[0], alignment, emulate)
    _check_scales(a, a_scales, b, b_scales)
    operands = (a, a_scales, b, b_scales)
    return _contiguous(operands, m_indices, name=_FP8, alignment=alignment, emulate=emulate)


def m_grouped_bf16_gemm_nt_masked(a, b, masked_m, expected_m, *, emulate=False):
    """Grouped GEMM on slabs of bf16 rows: ``a[e] @ b[e].T`` on the first masked_m[e] rows.

    Args:
      a: [E, M, K] bfloat16, K a multiple of 64, M of 128 (with ``emulate`` of 8). The kernels store
        whole blocks, so that the rest of a block beyond masked_m[e] is overwritten.
      b: [E, N, K] bfloat16, N a multiple of 8.
      masked_m: [E] int32, at most M each.
      expected_m: int, the mean of masked_m that DeepGEMM chooses its kernel by; never a limit.
      emulate: run the same chain on a CPU, with a numpy emulator in DeepGEMM's place.

    Returns:
      [E, M, N] bfloat16. Rows from masked_m[e] on are unspecified.

    Raises:
      TypeError, ValueError: a dtype or shape that the kernel cannot take.
      NotImplementedError: DeepGEMM cannot run here; the text says what is missing.
    """
    _check_rows(a, b, jnp.bfloat16, 64)
    _check_masked(a, masked_m, expected_m, emulate)
    return _masked((a, b), masked_m, name=_BF16_MASKED, expected_m=expected_m, emulate=emulate)


def m_grouped_fp8_fp4_gemm_nt_masked(a, b, masked_m, expected_m, *, emulate=False):
    """Grouped GEMM on slabs of FP8 rows with f32 scales; otherwise as the bf16 one. Needs SM90.

    Args:
      a: pair of values [E, M, K] float8_e4m3fn, K a multiple of 128, and scales [E, K/128, M4]
        float32, M4 = M rounded up to 4. DeepGEMM sees the transposed view: shape (E, M, K/128).
      b: pair of values [E, N, K] float8_e4m3fn, N a multiple of 8, and scales
        [E, ceil(N/128), K/128] float32, one per 128 x 128 block.
      masked_m, expected_m, emulate: as for bf16.

    Returns, raises: as the bf16 one.
    """
    (a, a_scales), (b, b_scales) = a, b
    _check_rows(a, b, jnp.float8_e4m3fn, _SCALE_GROUP)
    _check_masked(a, masked_m, expected_m, emulate)
    _check_scales(a, a_scales, b, b_scales)
    operands = (a, a_scales, b, b_scales)
    return _masked(operands, masked_m, name=_FP8_MASKED, expected_m=expected_m, emulate=emulate)


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
    emulate=False,
):
    """The layer's GEMM step: FP8 when both scales are given, bf16 when both are None.

    a [M, K] and a_scales [slabs * K/128, S] lie in slabs, and masked_m is read, where m_indices is
    None; else contiguously, and m_indices [M] is read. Result [M, N]; the rest as above.
    """
    if (a_scales is None) != (b_scales is None):
        raise ValueError("a_scales and b_scales must both be given (FP8) or both be None (bf16)")
    fp8 = a_scales is not None
    if m_indices is not None:
        function = (
            m_grouped_fp8_fp4_gemm_nt_contiguous if fp8 else m_grouped_bf16_gemm_nt_contiguous
        )
        a, b = ((a, a_scales), (b, b_scales)) if fp8 else (a, b)
        return function(a, b, m_indices, alignment=alignment, emulate=emulate)
    function = m_grouped_fp8_fp4_gemm_nt_masked if fp8 else m_grouped_bf16_gemm_nt_masked
    rows = a.shape[0]
    a = a.reshape(slabs, rows // slabs, a.shape[1])
    if fp8:
        a, b = (a, a_scales.reshape(slabs, -1, a_scales.shape[1])), (b, b_scales)
    return function(a, b, masked_m, expected_m, emulate=emulate).reshape(rows, -1)


def availability():
    """None when DeepGEMM can run here, else the reason as a sentence. Builds and imports nothing.

    Asks JAX for its default backend, so it starts JAX's backends if nothing has yet.
    """
    if jax.default_backend() != "gpu":
        return f"DeepGEMM needs a GPU, and JAX's default backend is {jax.default_backend()!r}"
    capability = _capability()
    if capability not in ("9.0", "10.0"):
        return f"DeepGEMM needs an sm_90 or sm_100 GPU, and this one has capability {capability}"
    return _missing_software(_PACKAGES)


def _capability():
    return str(getattr(jax.devices()[0], "compute_capability", None))


def _missing_software(packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(_PACKAGES[name] for name in missing)
        return f"DeepGEMM's bridge needs {', '.join(missing)}: pip install {names}"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        return f"DeepGEMM's bridge needs a C++ compiler, and there is no {compiler!r}: install g++"
    return None


def _check(name, array, dtype, shape):
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {jnp.dtype(dtype).name}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")


def _check_rows(a, b, dtype, depth_step):
    """a is [M, K] or, in slabs, [E, M, K]; b is [E, N, K]."""
    if a.ndim not in (2, 3) or b.ndim != 3:
        raise ValueError(
            f"a must be [M, K] or [E, M, K], b [E, N, K]; their shapes are {a.shape}, {b.shape}"
        )
    depth, (experts, columns, _) = a.shape[-1], b.shape
    _check("a", a, dtype, (*((experts,) if a.ndim == 3 else ()), *a.shape[-2:]))
    _check("b", b, dtype, (experts, columns, depth))
    if depth == 0 or depth % depth_step:
        raise ValueError(f"K is {depth}; it must be a positive multiple of {depth_step}")
    if experts == 0 or columns == 0 or columns % 8:
        raise ValueError(
            f"b has E = {experts}, N = {columns}; E must be positive, N a positive multiple of 8"
        )


def _check_m_indices(m_indices, rows, alignment, emulate):
    _check("m_indices", m_indices, jnp.int32, (rows,))
    if emulate and (alignment <= 0 or alignment % 8):
        raise ValueError(f"alignment is {alignment}; the emulator takes positive multiples of 8")
    if not emulate and alignment not in _GPU_ALIGNMENTS:
        raise ValueError(f"alignment is {alignment}; DeepGEMM takes one of {_GPU_ALIGNMENTS}")


def _check_masked(a, masked_m, expected_m, emulate):
    experts, rows, _ = a.shape
    _check("masked_m", masked_m, jnp.int32, (experts,))
    step = 8 if emulate else _GPU_SLAB
    if rows % step:
        raise ValueError(f"slabs have M = {rows} rows; M must be a multiple of {step}")
    if isinstance(expected_m, bool) or not isinstance(expected_m, (int, np.integer)):
        raise TypeError(f"expected_m is {expected_m!r}; it must be an int, known when tracing")
    if expected_m < 0:
        raise ValueError(f"expected_m is {expected_m}; it must be at least 0")


def _check_scales(a, a_scales, b, b_scales):
    *slabs, rows, depth = a.shape
    groups, (experts, columns, _) = depth // _SCALE_GROUP, b.shape
    _check("scales of a", a_scales, jnp.float32, (*slabs, groups, -(-rows // 4) * 4))
    _check("scales of b", b_scales, jnp.float32, (experts, -(-columns // _SCALE_GROUP), groups))


_NEEDS_GPU = (
    "DeepGEMM needs a GPU; backend='xla' runs anywhere, backend='emulator' runs the same program"
    " on a CPU with an emulator in DeepGEMM's place"
)
_NEEDS_CPU = "the emulator of DeepGEMM reads host memory and runs on a CPU only"


@functools.partial(jax.jit, static_argnames=("name", "alignment", "emulate"), inline=True)
def _contiguous(operands, m_indices, *, name, alignment, emulate):
    a, b = operands[0], operands[len(operands) // 2]
    rows = a.shape[0]
    # The FP8 kernel reads m_indices at every 64th row of a block, also past M.
    if rows % alignment:
        m_indices = jnp.pad(m_indices, (0, -rows % alignment), constant_values=-1)
    shape = (rows, b.shape[1])
    return _call(name, operands, m_indices, shape, emulate, alignment=np.int64(alignment))


@functools.partial(jax.jit, static_argnames=("name", "expected_m", "emulate"), inline=True)
def _masked(operands, masked_m, *, name, expected_m, emulate):
    a, b = operands[0], operands[len(operands) // 2]
    shape = (*a.shape[:2], b.shape[1])
    # DeepGEMM refuses 0.
    return _call(name, operands, masked_m, shape, emulate, expected_m=np.int64(max(1, expected_m)))


def _call(name, operands, groups, shape, emulate, **attributes):
    """[*shape] bf16 from the function ``name``; ``groups`` says which rows are whose."""
    if 0 in shape:
        return jnp.zeros(shape, jnp.bfloat16)
    if emulate:
        _install("cpu")
    elif jax.default_backend() == "gpu":
        reason = availability()
        if reason is None and name in (_FP8, _FP8_MASKED) and _capability() != "9.0":
            reason = "DeepGEMM's SM100 FP8 kernels want packed UE8M0 scales, not f32; bf16 runs"
        if reason is not None:
            raise NotImplementedError(reason)
        _install("gpu")
    *operands, groups = vary_alike(*operands, groups)
    groups = only_on(groups, "cpu", _NEEDS_CPU) if emulate else only_on(groups, "cuda", _NEEDS_GPU)
    like = jax.typeof(operands[0])
    result = jax.ShapeDtypeStruct(
        shape,
        jnp.bfloat16,
        sharding=like.sharding,
        manual_axis_type=like.manual_axis_type,
    )
    target = (_EMULATED_TARGET if emulate else _TARGET) + name
    return jax.ffi.ffi_call(target, result)(*operands, groups, **attributes)


def _install(platform):
    """Builds the shim, gives it its functions and registers its targets; once per process."""
    with _lock:
        if platform in _installed:
            return
        if platform == "cpu":
            reason = _missing_software(("tvm_ffi", "jax_tvm_ffi", "ninja"))
            if reason is not None:
                raise NotImplementedError(reason)
        import jax_tvm_ffi
        import tvm_ffi

        if platform == "gpu":
            # DeepGEMM reads it at its first GEMM.
            os.environ.setdefault("DG_JIT_CACHE_DIR", str(kernel_cache_dir()))
            import deep_gemm
            import torch

            # Before any stream guard: it brings up torch's side of the context that XLA uses.
            torch.cuda.init()
            functions = _deep_gemm_functions(deep_gemm)
        else:
            from . import emulator

            contiguous = tvm_ffi.convert(emulator.m_grouped_gemm_nt_contiguous)
            masked = tvm_ffi.convert(emulator.m_grouped_gemm_nt_masked)
            emulated = {_FP8: contiguous, _BF16: contiguous}
            emulated |= {_FP8_MASKED: masked, _BF16_MASKED: masked}
            functions = ({name: (f, []) for name, f in emulated.items()}, None, None)
        kernels, get_alignment, set_alignment = functions
        shim = tvm_ffi.load_module(str(_build_shim(platform)))
        flat = [part for name in _TENSORS for part in kernels[name]]
        shim.install(*flat, get_alignment, set_alignment)
        prefix = _EMULATED_TARGET if platform == "cpu" else _TARGET
        for name in _TENSORS:
            attribute = "expected_m" if name in (_FP8_MASKED, _BF16_MASKED) else "alignment"
            jax_tvm_ffi.register_ffi_target(
                prefix + name,
                shim.get_function(name),
                arg_spec=["args", "rets", f"attrs.{attribute}"],
                platform=platform,
                # DeepGEMM's host side takes some 30 us a call, longer than a decode-sized GEMM
                # runs. Twenty (256, 1536, 2048) FP8 GEMMs in a program: 10 us each captured, 29
                # not; equal when the output buffers are new at every call.
                allow_cuda_graph=platform == "gpu",
            )
        _installed.add(platform)


def _deep_gemm_functions(deep_gemm):
    """{name: (function, what follows its tensors)}, and how to get and to set the alignment."""
    # _C takes positional arguments, and which follow the tensors differs between wheels: run the
    # wheel's own Python wrapper with a stand-in for _C and see what it passes on.
    core, kernels = deep_gemm._C, {}
    for name, tensors in _TENSORS.items():
        given = {t: object() for t in tensors}
        pairs = [
            (given[x], given[f"{x}_scales"]) if f"{x}_scales" in given else given[x] for x in "ab"
        ]
        # The masked ones take expected_m after the tensors.
        last = [given[tensors[-1]]] + ([object()] if tensors[-1] == "masked_m" else [])
        passed = [*(given[t] for t in tensors[:-1]), *last]
        tail = _passed_on(getattr(deep_gemm, name), (*pairs, given["d"], *last), passed)
        kernels[name] = (getattr(core, name), tail)
    get, set_ = (f"{verb}_mk_alignment_for_contiguous_layout" for verb in ("get", "set"))
    return kernels, getattr(core, get), getattr(core, set_)


def _passed_on(wrapper, args, tensors):
    """What a wrapper of deep_gemm passes to ``_C`` after the tensors when called with ``args``."""
    calls = []

    class StandIn:
        def __getattr__(self, name):
            return lambda *passed: calls.append((name, passed))

    probe = types.FunctionType(
        wrapper.__code__,
        {**wrapper.__globals__, "_C": StandIn()},
        wrapper.__name__,
        wrapper.__defaults__,
        wrapper.__closure__,
    )
    probe(*args)
    if len(calls) == 1 and calls[0][0] == wrapper.__name__:
        passed = list(calls[0][1])
        head, tail = passed[: len(tensors)], passed[len(tensors) :]
        if all(x is y for x, y in zip(head, tensors, strict=True)):
            return tail
    raise NotImplementedError(
        f"deep_gemm.{wrapper.__name__} does not call _C the way that sgl-deep-gemm 0.1.5 and "
        f"0.2.0 do; it made the calls {calls}"
    )


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
