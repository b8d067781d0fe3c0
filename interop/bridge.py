"""How a call inside ``jax.jit`` reaches DeepGEMM: XLA FFI -> jax-tvm-ffi -> shim.cpp -> ``_C``.

``deep_gemm`` has the functions and checks what they are given; here is what they share: the table
of DeepGEMM's functions, the call, and how the installed wheel, or the emulator in its place, is
handed to the shim.
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
from jax.sharding import NamedSharding, PartitionSpec

from dgmoe_jax.platforms import only_on
from dgmoe_jax.tracing import vary_alike


class _Function(typing.NamedTuple):
    """Parameters of a function of deep_gemm that a call gives; "a", "a_scales" are one pair there.

    tensors are in the order of ``_C``, attributes are integers, tuples of them or None.
    """

    tensors: tuple[str, ...]
    attributes: tuple[str, ...] = ()


SCALED = ("a", "a_scales", "b", "b_scales")
_RECIPES = ("recipe", "recipe_a", "recipe_b", "disable_ue8m0_cast")
_FUNCTIONS = {
    "m_grouped_fp8_fp4_gemm_nt_contiguous": _Function((*SCALED, "d", "grouped_layout"), _RECIPES),
    "m_grouped_bf16_gemm_nt_contiguous": _Function(("a", "b", "d", "grouped_layout")),
    "m_grouped_fp8_fp4_gemm_nt_masked": _Function(
        (*SCALED, "d", "masked_m"), ("expected_m", *_RECIPES)
    ),
    "m_grouped_bf16_gemm_nt_masked": _Function(("a", "b", "d", "masked_m"), ("expected_m",)),
    "fp8_fp4_gemm_nt": _Function((*SCALED, "d"), _RECIPES),
    "bf16_gemm_nt": _Function(("a", "b", "d")),
    "tf32_hc_prenorm_gemm": _Function(("a", "b", "d", "sqr_sum"), ("num_splits",)),
    "k_grouped_fp8_gemm_nt_contiguous": _Function(
        (*SCALED, "d", "grouped_layout", "c"), ("ks", "recipe")
    ),
    "k_grouped_fp8_gemm_tn_contiguous": _Function(
        (*SCALED, "d", "grouped_layout", "c"), ("ks", "recipe")
    ),
    "k_grouped_bf16_gemm_tn_contiguous": _Function(("a", "b", "d", "grouped_layout", "c"), ("ks",)),
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


def check_integer(name, value, least):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}; it must be an int, known when tracing")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_integers(name, values, count, least):
    if not isinstance(values, tuple) or len(values) != count:
        raise TypeError(f"{name} is {values!r}; it must be a tuple of {count} ints")
    for value in values:
        check_integer(f"{name} {values}: {value!r}", value, least)


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
            check_integer("num_sms", self.num_sms, least=1)
        if not isinstance(self.pdl, (bool, type(None))):
            raise TypeError(f"pdl is {self.pdl!r}; it must be True, False or None")
        if self.block_size_multiple_of is not None:
            check_integers("block_size_multiple_of", self._blocks(), 2, least=1)

    def _blocks(self):
        both = self.block_size_multiple_of
        return (both, both) if isinstance(both, int) else both

    def _values(self, alignment):
        """In the order of _SETTINGS, each a tuple of the setter's arguments."""
        single = (alignment, self.num_sms, self.pdl)
        return (*(() if v is None else (int(v),) for v in single), self._blocks() or ())


UNSET = Settings()


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


class _Static(typing.NamedTuple):
    """What a call is, apart from its operands; hashable."""

    name: str
    target: str
    results: tuple  # (shape, dtype) of each
    views: tuple[int, ...]  # as shim.cpp's View takes them, operands first
    attributes: tuple  # in the order of the function's, then of _SETTINGS
    emulate: bool


def call(
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
    like = jax.typeof(operands[0])

    def result(shape, dtype):
        sharding, axes = like.sharding, like.manual_axis_type
        if len(shape) != like.ndim:
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=axes)

    results = [result(*each) for each in static.results]
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
            # The first GPU's library is the one that torch code in this process calls.
            devices = sorted(device.local_hardware_id for device in jax.local_devices())
            cores = _cores(deep_gemm, len(devices))
            libraries = [_library(core, templates) for core in cores]
        else:
            libraries = [_emulated_library()]
        shim = tvm_ffi.load_module(str(_build_shim(platform)))
        if len(libraries) == 1:
            devices = [-1]
        for library, device in zip(libraries, devices, strict=True):
            shim.install(*library, device)
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
            allow_cuda_graph=platform == "gpu" and name != "k_grouped_fp8_gemm_nt_contiguous",
        )


def _library(core, templates):
    """What shim.cpp's Install takes: kernels and settings of one loaded copy of ``_C``."""
    kernels = [
        (getattr(core, name), *templates[name]) if name in templates else (None, [], [])
        for name in _FUNCTIONS
    ]
    settings = [
        (get and getattr(core, get, None), getattr(core, set_, None), initial)
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
        tensors = [x for x in found if x in function.tensors]
        if tensors == [*function.tensors] and len(found) == len(given):
            return passed
    raise NotImplementedError(
        f"deep_gemm.{name} does not call _C the way that sgl-deep-gemm 0.1.5 and 0.2.0 do; it made "
        f"the calls {calls}"
    )


def _cores(deep_gemm, count):
    """The loaded ``_C``, and copies of it for other devices, where each has state of its own."""
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
    except (OSError, ValueError, struct.error):
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
