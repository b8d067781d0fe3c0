"""DeepGEMM's compiled kernels on disk: compiling many of them side by side, and telling which came.

DeepGEMM compiles a kernel at the first call that needs it, some 10 s in one thread, and renames it
as a whole into ``cache/kernel.<name>.<hash>`` (kernel.cu and kernel.cubin) under
`deep_gemm.kernel_cache_dir`: processes that share the directory cannot see half of one. The hash
covers the source, the compiler's version and the path of DeepGEMM's headers: shipped elsewhere, the
cache serves the same wheel at the same path beside the same nvcc, on the same model of GPU.

``python -m dgmoe_jax.interop.kernel_cache`` is the worker of `compile_gemms`.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax

from . import bridge

_SLAB = 128  # rows; the masked kernels are chosen by expected_m alone
_WORKER_BYTES = 2**30  # CUDA context and torch's own
_WARM = "dgmoe_jax_warm.json"
_REFUSED = "dgmoe_jax.assert_warm_refuses_to_compile"


@contextlib.contextmanager
def locked(directory):
    """Holds ``directory/warmup.lock``; waits for another process that does.

    By tvm_ffi's lock, as nothing compiles here without tvm_ffi: flock, which ends with its process.
    """
    from tvm_ffi.utils import FileLock

    lock = pathlib.Path(directory) / "warmup.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()  # the lock would wait for ever for a directory that cannot be written
    with FileLock(str(lock)):
        yield


def build_shim(platform):
    """True if it had to be built. Processes that come at once build it once.

    Raises NotImplementedError where software is missing.
    """
    reason = bridge.emulator_availability() if platform == "cpu" else bridge.availability()
    if reason is not None:
        raise NotImplementedError(reason)
    with locked(bridge._cache_dir()):
        shims = set(bridge._cache_dir().glob("*.so"))
        return bridge._build_shim(platform) not in shims


def kernels():
    """Names of the folders of all kernels compiled so far."""
    return {path.parent.name for path in bridge.kernel_cache_dir().glob("cache/*/kernel.cubin")}


def sources():
    """{path: kernel} of all sources, those whose compilation was refused or runs included."""
    found = {}
    for path in bridge.kernel_cache_dir().glob("*/*/kernel.cu"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            text = path.read_text()
            named = re.search(r"reinterpret_cast<void\*>\(&(.*?)\);", text, re.S)
            found[path] = " ".join(named[1].split()) if named else path.parent.name
    return found


def directories():
    """Of the shims and of the kernels; the second may lie in the first."""
    return bridge._cache_dir(), bridge.kernel_cache_dir()


def size_bytes(*roots):
    """Bytes of all files below; of the shims and kernels where no root is named."""
    files = {path for root in roots or directories() for path in root.rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in files)


@contextlib.contextmanager
def nvcc_refuses():
    """Within it every nvcc that this process starts fails to compile (``--version`` works)."""
    flags = os.environ.get("NVCC_APPEND_FLAGS")
    os.environ["NVCC_APPEND_FLAGS"] = f"{flags or ''} --pre-include {_REFUSED}"
    try:
        yield
    finally:
        if flags is None:
            del os.environ["NVCC_APPEND_FLAGS"]
        else:
            os.environ["NVCC_APPEND_FLAGS"] = flags


def compile_gemms(gemms, processes, advance):
    """Has DeepGEMM compile what ``gemms`` need: (kernels used, those of them that are new).

    Args:
      gemms: sorted list of dicts, the fields of `dgmoe_jax.warmup.Gemm`.
      processes: how many at a time; None: one a core, as many as the GPU has memory for.
      advance: called with a number of GEMMs whenever so many are done.

    Raises:
      RuntimeError: a worker failed; the text ends with what it wrote.
    """
    directory = bridge.kernel_cache_dir()
    with locked(directory):
        before, key = kernels(), _identity()
        noted = directory / _WARM
        notes = json.loads(noted.read_text()) if noted.exists() else {}
        known = notes.get(key, {"gemms": [], "kernels": []})
        if not before.issuperset(known["kernels"]):
            known = {"gemms": [], "kernels": []}
        done = {json.dumps(gemm) for gemm in known["gemms"]}
        todo = [gemm for gemm in gemms if json.dumps(gemm) not in done]
        advance(len(gemms) - len(todo))
        shares = [share for share in split(todo, processes or _processes(todo)) if share]
        used = set(known["kernels"])
        with ThreadPoolExecutor(max(1, len(shares))) as pool:
            for loaded in pool.map(lambda share: _worker(share, advance), shares):
                used |= loaded
        new = kernels() - before
        used |= new
        known = {"gemms": known["gemms"] + todo, "kernels": sorted(used)}
        scratch = noted.with_suffix(".tmp")
        scratch.write_text(json.dumps(notes | {key: known}))
        scratch.replace(noted)
    return used, new


def split(gemms, count):
    """``count`` lists. GEMMs that differ in m only often share a kernel, the nearer the likelier:
    neighbours stay together, so that few kernels are compiled twice."""
    shares, turn = [[] for _ in range(count)], itertools.count()
    for _, run in itertools.groupby(gemms, key=lambda gemm: {**gemm, "m": None}):
        run = list(run)
        step = -(-len(run) // count)
        for at in range(0, len(run), step):
            shares[next(turn) % count] += run[at : at + step]
    return shares


def _identity():
    """What a kernel's hash and DeepGEMM's choice of it depend on, besides the GEMM."""
    from deep_gemm.cuda_helpers import find_cuda_home

    nvcc = os.environ.get("DG_JIT_NVCC_COMPILER") or f"{find_cuda_home()}/bin/nvcc"
    compiler = None
    with contextlib.suppress(OSError):  # DG_JIT_USE_NVRTC needs none
        compiler = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    settings = {name: value for name, value in os.environ.items() if name.startswith("DG_")}
    settings.pop("DG_JIT_CACHE_DIR", None)
    where = importlib.util.find_spec("deep_gemm").origin
    version = importlib.metadata.version("sgl-deep-gemm")
    return json.dumps([version, where, compiler, jax.devices()[0].device_kind, settings])


def _row_count(gemm):
    return gemm["groups"] * _SLAB if gemm["layout"] == "masked" else gemm["m"]


def _bytes(gemm):
    n, k, width = gemm["n"], gemm["k"], 2 if gemm["recipe"] == "bf16" else 1
    return width * gemm["groups"] * n * k + _row_count(gemm) * (width * k + 2 * n) + _WORKER_BYTES


def _processes(gemms):
    wanted = min(len(os.sched_getaffinity(0)), len(gemms))
    try:
        free = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
        ).stdout.split()
        # Which of them CUDA_VISIBLE_DEVICES means is not worth finding out.
        fit = min(int(mib) for mib in free) * 2**20 // max(map(_bytes, gemms), default=1)
    except (OSError, ValueError):
        fit = wanted
    return max(1, min(wanted, fit))


def _worker(gemms, advance):
    """Runs them in a process of their own; the kernels that it loaded."""
    directory = str(bridge.kernel_cache_dir())
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=os.environ | {"DG_JIT_CACHE_DIR": directory, "DG_JIT_PRINT_LOAD_TIME": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    loaded, log = set(), []
    with process:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have died
            json.dump(gemms, process.stdin)
        for line in process.stdout:
            if line == "done\n":
                advance(1)
            elif named := re.match(r"Load time \(.*?(kernel\.[^/]*)\)", line):
                loaded.add(named[1])
            else:
                log.append(line)
    if process.returncode:
        raise RuntimeError(f"compiling DeepGEMM's kernels failed:\n{''.join(log[-30:])}")
    return loaded


def _main():
    gemms = json.load(sys.stdin)
    import deep_gemm
    import torch

    libc = ctypes.CDLL(None)

    def zeros(count, fp8):
        if fp8:
            return torch.zeros(count, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        return torch.zeros(count, dtype=torch.bfloat16, device="cuda")

    def weights_of(gemm):
        return gemm["groups"], gemm["n"], gemm["k"], gemm["recipe"] != "bf16"

    for (groups, n, k, fp8), run in itertools.groupby(gemms, key=weights_of):
        run = list(run)
        most = max(map(_row_count, run))
        b, source = zeros(groups * n * k, fp8).view(groups, n, k), zeros(most * k, fp8)
        target = torch.empty(most * n, dtype=torch.bfloat16, device="cuda")
        if fp8:
            b = b, torch.zeros(groups, -(-n // 128), k // 128, device="cuda")
            scales = torch.zeros(-(-most // 4) * 4 * (k // 128), device="cuda")
        # No row is live: what counts is that DeepGEMM looks for its kernel.
        masked_m = torch.zeros(groups, dtype=torch.int32, device="cuda")
        nobody = torch.full((most + 128,), -1, dtype=torch.int32, device="cuda")
        for gemm in run:
            masked, m = gemm["layout"] == "masked", gemm["m"]
            lead, rows = ((groups,), _SLAB) if masked else ((), m)
            count = _row_count(gemm)
            a, d = (
                source[: count * k].view(*lead, rows, k),
                target[: count * n].view(*lead, rows, n),
            )
            if fp8:
                padded = -(-rows // 4) * 4
                sfa = scales[: count // rows * padded * (k // 128)].view(*lead, k // 128, padded)
                a = a, sfa[..., :rows].mT
            if masked:
                name = (
                    "m_grouped_fp8_fp4_gemm_nt_masked" if fp8 else "m_grouped_bf16_gemm_nt_masked"
                )
                getattr(deep_gemm, name)(a, b, d, masked_m, m)
            else:
                deep_gemm.set_mk_alignment_for_contiguous_layout(gemm["alignment"])
                kind = "fp8_fp4" if fp8 else "bf16"
                function = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")
                function(a, b, d, nobody[:m])
            libc.fflush(None)  # DeepGEMM prints by way of C
            print("done", flush=True)
        torch.cuda.synchronize()
        b = source = target = scales = a = d = sfa = None  # before the next weights are made


if __name__ == "__main__":
    _main()
