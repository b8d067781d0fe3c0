"""Compiling ahead what would be compiled at first use, and refusing to compile from then on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dgmoe_jax import backends, checks
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.plan import Plan, dense, plan
from dgmoe_jax.progress import bar
from dgmoe_jax.recipes import padded, run_on

ANY_MEMORY = 2**62  # bytes free: slabs wherever they gain something


@dataclass(frozen=True, order=True)
class Gemm:
    """All that DeepGEMM chooses a kernel by, the GPU aside.

    layout: as in a plan. recipe: of the operands, "fp8_block" where another runs as that one.
    groups, n, k: the weights' shape. alignment: of contiguous segments, 0 where masked. m: number
    of rows, or `expected_m` where masked.
    """

    layout: str
    recipe: str
    groups: int
    n: int
    k: int
    alignment: int
    m: int


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` did.

    gemms: distinct GEMMs that those sizes need. compiled, reused: names of DeepGEMM's kernels,
    those that are new, and those that this or an earlier warm-up found in the same cache.
    shim_built: the bridge's shim was. cache_bytes: size of all that is cached now. why: a sentence.
    """

    gemms: int
    compiled: tuple[str, ...]
    reused: tuple[str, ...]
    shim_built: bool
    seconds: float
    cache_bytes: int
    why: str

    def __str__(self) -> str:
        shim = "built" if self.shim_built else "not built"
        return (
            f"{self.why}: {len(self.compiled)} kernels compiled, {len(self.reused)} reused, shim"
            f" {shim}, {self.seconds:.1f} s, {self.cache_bytes / 1e6:.1f} MB cached"
        )


def gemms(
    cfg: MoEConfig,
    token_counts: Iterable[int],
    *,
    arch: str | None = None,
    ep_size: int = 1,
    tp_size: int = 1,
) -> list[Gemm]:
    """DeepGEMM's GEMMs for all these numbers of tokens, sorted; a pure function once `arch` is.

    Where the plan may choose slabs, both layouts: it falls back to the contiguous one when little
    memory is free at tracing time.

    Raises: as `plan`.
    """
    cfg, arch, found = cfg.as_grouped(), arch or backends.current_arch(), set()
    ep_size, tp_size = checks.count("ep_size", ep_size, 1), checks.count("tp_size", tp_size, 1)
    routed = -(-cfg.num_experts // ep_size), -(-cfg.intermediate_size // tp_size)
    for num_tokens in sorted(set(token_counts)):
        for decision in _plans(cfg, num_tokens, arch, ep_size, tp_size):
            recipe = run_on(cfg.recipe, arch, cfg.backend).operands.name
            blocks = [(decision, *routed)]
            if cfg.num_shared_experts:
                shared = 1, cfg.num_shared_experts * cfg.intermediate_size
                # Of all tokens, or of a rank's own.
                for count in {num_tokens, -(-num_tokens // ep_size)}:
                    blocks.append((dense(decision, count, cfg.recipe), *shared))
            for block, groups, inner in blocks:
                hidden, inner = padded(cfg.hidden_size), padded(inner)
                masked = block.layout == "masked"
                rows = (0, block.expected_m) if masked else (block.alignment, block.rows)
                for n, k in ((2 * inner, hidden), (hidden, inner)):
                    found.add(Gemm(block.layout, recipe, groups, n, k, *rows))
    return sorted(found)


def _plans(
    cfg: MoEConfig, num_tokens: int, arch: str, ep_size: int, tp_size: int
) -> Iterator[Plan]:
    split = dict(arch=arch, ep_size=ep_size, tp_size=tp_size)
    decision = plan(cfg, num_tokens, **split, free_bytes=ANY_MEMORY)
    if decision.backend != "deep_gemm" or num_tokens == 0:
        return
    yield decision
    if cfg.layout == "auto" and decision.layout == "masked":
        yield plan(cfg, num_tokens, **split)


def warmup(
    cfg: MoEConfig,
    token_counts: Iterable[int],
    *,
    arch: str | None = None,
    ep_size: int = 1,
    tp_size: int = 1,
    cache_dir: str | os.PathLike | None = None,
    processes: int | None = None,
    progress: bool = True,
) -> WarmupReport:
    """Compiles the shim and every DeepGEMM kernel that `moe_layer` needs for these sizes.

    Call it before weights are loaded and before the first GEMM of the process: each worker holds
    one layer's largest weight on the GPU. XLA's programs, our Pallas kernels among them, are JAX's
    to compile (its `jax_compilation_cache_dir` keeps them). A routing of one's own with another
    top_k than the router's is not covered.

    Args:
      cfg: the layer.
      token_counts: numbers of tokens, in any order; of all ranks together where several share the
        experts.
      arch: what to plan for ("sm90", ...); None asks the default device. Kernels are compiled
        where they run, so it must be that device's.
      ep_size, tp_size: as in `plan`, for a rank of a layer whose experts are split; its shared
        experts are taken for whole ones (`Parallel(shared="replicated")`).
      cache_dir: where all goes, made if missing; None: DGMOE_JAX_CACHE_DIR, DG_JIT_CACHE_DIR or
        the defaults. Sets the first two for this process and its children; others that are to use
        what lies there set DGMOE_JAX_CACHE_DIR. It serves any machine with the same model of
        GPU and the same Python packages and CUDA at the same paths.
      processes: compile so many at a time; None: one a core, as many as fit on the GPU.
      progress: show a bar (where rich is installed).

    Processes that call it at once on one directory compile once; the others wait.

    Returns:
      A `WarmupReport`, empty where nothing of DeepGEMM's is compiled ("xla", "pallas"); "emulator"
      builds the shim.

    Raises:
      ValueError, TypeError: as `plan`; `processes` below 1.
      NotImplementedError: what is asked for does not run here; the text says why.
      RuntimeError: a kernel did not compile; the text ends with the compiler's.
    """
    start = time.monotonic()
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes}: must be at least 1")
    here = backends.current_arch()
    split = dict(ep_size=ep_size, tp_size=tp_size)
    needed = gemms(cfg, token_counts, arch=arch or here, **split)
    if cache_dir is not None:
        cache_dir = Path(cache_dir).absolute()
        os.environ["DGMOE_JAX_CACHE_DIR"] = str(cache_dir)
        os.environ["DG_JIT_CACHE_DIR"] = str(cache_dir / "deep_gemm")
    missing = backends.deep_gemm_unavailable() if needed else None
    if cfg.backend == "auto" and missing and arch in (None, here):
        needed, why = [], f"nothing to compile: 'auto' runs without DeepGEMM here ({missing})"
    elif missing:
        raise NotImplementedError(f"cannot compile for backend='deep_gemm': {missing}")
    elif needed and arch not in (None, here):
        raise NotImplementedError(f"arch={arch!r}: kernels compile where they run, here on {here}")
    elif needed and here != "sm90" and cfg.recipe != "bf16":
        raise NotImplementedError(
            f"recipe={cfg.recipe!r} on {here}: warm-up makes operands of sm90 only, and 'bf16'"
        )
    elif cfg.backend == "emulator":
        why = "the emulator needs the shim only"
    else:
        why = "nothing to compile: these sizes do without DeepGEMM"
    used, new, built = set(), set(), False
    if needed or cfg.backend == "emulator":
        from dgmoe_jax.interop import kernel_cache

        built = kernel_cache.build_shim("gpu" if needed else "cpu")
        if needed:
            why = f"{len(needed)} GEMMs of DeepGEMM's"
            with bar("DeepGEMM's kernels, by GEMM", len(needed), progress) as advance:
                used, new = kernel_cache.compile_gemms(
                    [asdict(gemm) for gemm in needed], processes, advance
                )
        cache_bytes = kernel_cache.size_bytes()
    else:
        cache_bytes = 0
    return WarmupReport(
        gemms=len(needed),
        compiled=tuple(sorted(new)),
        reused=tuple(sorted(used - new)),
        shim_built=built,
        seconds=time.monotonic() - start,
        cache_bytes=cache_bytes,
        why=why,
    )


@contextlib.contextmanager
def assert_warm() -> Iterator[None]:
    """``with assert_warm(): ...``: nothing of DeepGEMM's is compiled within.

    nvcc refuses within, so that a call that needs a kernel which is not in the cache fails at once;
    and when the block is left, by that error or otherwise, RuntimeError names every kernel whose
    source came into the cache directory meanwhile (another process's as well). With
    DG_JIT_USE_NVRTC there is no nvcc to refuse: then only leaving the block tells. Block on results
    before leaving it, since JAX runs ahead. It holds for the process: enter it from one thread.

    XLA captures a program into a CUDA graph when it runs it first, and DeepGEMM's host code runs in
    that capture, and so would its compiler: `warmup` before the first run is what keeps compilation
    out, and this is what proves it.
    """
    from dgmoe_jax.interop import kernel_cache

    before = kernel_cache.sources()

    def check(problem: Exception | None) -> None:
        now = kernel_cache.sources()
        if new := sorted(now[path] for path in now.keys() - before.keys()):
            raise RuntimeError(
                f"assert_warm: DeepGEMM had to compile {', '.join(new)}; give warmup these sizes"
            ) from problem

    with kernel_cache.nvcc_refuses():
        try:
            yield
        except Exception as problem:
            check(problem)
            raise
    check(None)
