"""What the layer is measured against, on its own weights, tokens and routing.

Torch reads the JAX arrays where they lie. Each control returns numbers, or says why it has none.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _bench
import jax
import jax.numpy as jnp
import numpy as np
from dgmoe_jax.interop import sglang as sglang_runner

import dgmoe_jax as dg
from dgmoe_jax import layouts
from dgmoe_jax.plan import tiling

TOLERANCE = 0.02
"""Largest relative difference from the layer at which SGLang's flow is timed: it rounds the
activation to bf16 before quantising, so that some FP8 values fall on a neighbour."""
MOST_RAGGED_BYTES = 2**33


@dataclass(frozen=True)
class Work:
    """`layers` layers' inputs, the same for everything that is timed: tokens and their routing."""

    xs: jax.Array  # [layers, T, H] bf16
    ids: jax.Array  # [layers, T, k] int32
    weights: jax.Array  # [layers, T, k] f32


class _Bytes:
    """A JAX array for torch, not copied; as bytes, since the protocol knows no FP8 and no bf16."""

    def __init__(self, array: jax.Array):
        self.array = array  # keeps it alive
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (*array.shape[:-1], array.shape[-1] * array.dtype.itemsize),
            "data": (array.unsafe_buffer_pointer(), False),
        }


def as_torch(array: jax.Array | None) -> Any:
    """The same memory as a torch tensor."""
    import torch

    if array is None:
        return None
    jax.block_until_ready(array)
    return torch.as_tensor(_Bytes(array), device="cuda").view(getattr(torch, array.dtype.name))


def unavailable() -> str | None:
    """Why torch cannot run controls beside this JAX, or None."""
    if jax.default_backend() != "gpu":
        return "needs a GPU"
    for package in ("torch", "deep_gemm"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def copy_bytes_per_s(num_bytes: int = 2**32) -> float:
    """Rate of a device-to-device copy, counting bytes read and written.

    The better of the driver's own, which can be a copy engine's, and an elementwise kernel's.
    """
    import torch

    source = torch.ones(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)

    def us(call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / 4

    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    # The first ones find the clocks at rest.
    times = [statistics.median([us(copy) for _ in range(15)][5:]) for copy in copies]
    return 2 * num_bytes / min(times) * 1e6


def graph_us(call: Callable[[int], object], layers: int, queued: int, repeats: int = 15) -> float:
    """Device time of one `call(i)`: i = 0 .. layers - 1 captured in one CUDA graph, which is
    replayed `queued` times in a row."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles, and fills torch's pool
            call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(layers):
            call(i)
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(queued):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / layers / queued)
    return statistics.median(times[2:])


def eager_us(call: Callable[[int], object], repeats: int = 20) -> float:
    """Wall time of `call(0)` from Python until the device is done."""
    import torch

    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        call(0)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[3:])


def best(found: dict[str, float | str]) -> str | None:
    """The fastest entry's name; an entry without a time says why in words."""
    times = {name: us for name, us in found.items() if not isinstance(us, str)}
    return min(times, key=times.get, default=None)


def why(problem: Exception) -> str:
    """An exception in one line."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def sglang(cfg: dg.MoEConfig, params: dg.MoEParams, work: Work, y: jax.Array) -> dict:
    """SGLang's DeepGEMM runner in both of its layouts: by graph replay, and called from Python.

    `y` is the layer's result on work.xs[0], which it must reproduce.
    """
    none = dict.fromkeys(("control_us", "control_layout", "control_eager_us", "control_difference"))
    reason = unavailable() or sglang_runner.unavailable()
    if reason:
        return {"control": f"SGLang: skipped, {reason}", **none}
    import torch

    weights = [(as_torch(w.values), as_torch(w.scales)) for w in _pair(params)]
    inputs = [as_torch(a) for a in (work.xs, work.ids, work.weights)]
    expected = as_torch(y).float()
    graph, eager, differs = {}, {}, {}
    for layout in sglang_runner.LAYOUTS:
        try:
            layer = sglang_runner.layer(*weights, inputs[0][0], cfg.router.top_k, layout)
            call = lambda i, layer=layer: layer(*(a[i] for a in inputs))  # noqa: E731
            differs[layout] = float((call(0).float() - expected).norm() / expected.norm())
            if not differs[layout] <= TOLERANCE:
                raise ValueError(f"differs from the layer by {differs[layout]:.4f}, not timed")
            eager[layout] = eager_us(call)
            graph[layout] = graph_us(call, len(work.xs), _bench.programs_queued(work.xs.shape[1]))
        except Exception as problem:
            graph[layout] = why(problem)
        torch.cuda.empty_cache()
    layout = best(graph)
    if layout is None:
        return {"control": f"SGLang: failed, {graph}", **none}
    version = _bench.package_version("sglang")
    return {
        "control": f"SGLang {version} DeepGEMM runner, CUDA graph, no router",
        "control_us": graph[layout],
        "control_layout": layout,
        "control_eager_us": min(eager.values()),
        "control_difference": differs[layout],
        "control_layouts": graph,
    }


def gemms(cfg: dg.MoEConfig, params: dg.MoEParams, work: Work) -> dict:
    """DeepGEMM's two grouped GEMMs alone, masked and contiguous, by graph replay."""
    reason = unavailable()
    if reason:
        return {"gemms_us": None, "gemms_layout": f"skipped, {reason}"}
    import torch

    layers, tokens, top_k = work.ids.shape
    counts = np.stack(
        [np.bincount(i.ravel(), minlength=cfg.num_experts) for i in np.asarray(work.ids)]
    )
    found = {}
    for layout in gemm_layouts(tokens * top_k / cfg.num_experts):
        try:
            found[layout] = graph_us(
                _gemm_pair(params, counts, tokens, layout), layers, _bench.programs_queued(tokens)
            )
        except Exception as problem:
            found[layout] = why(problem)
        torch.cuda.empty_cache()
    layout = best(found)
    return {"gemms_us": found.get(layout), "gemms_layout": layout, "gemms_layouts": found}


def gemm_layouts(expected_rows: float) -> list[str]:
    """Masked, and contiguous at DeepGEMM's own alignment of 128 and at the one that was measured
    faster with so few rows per expert."""
    alignment, _, _ = tiling(expected_rows, "deep_gemm", "fp8_block")
    return ["masked", *(f"contiguous {a}" for a in sorted({alignment, 128}))]


def compile_gemms(cfg: dg.MoEConfig, params: dg.MoEParams, tokens: int, layout: str) -> None:
    """Has DeepGEMM compile into its cache what `_gemm_pair` will run, by running it once."""
    import torch

    assignments = np.arange(tokens * cfg.router.top_k)
    counts = np.bincount(assignments % cfg.num_experts, minlength=cfg.num_experts)[None]
    _gemm_pair(params, counts, tokens, layout)(0)
    torch.cuda.synchronize()


def _gemm_pair(
    params: dg.MoEParams, counts: np.ndarray, tokens: int, layout: str
) -> Callable[[int], None]:
    """call(i): w13's and w2's GEMM on rows spread as counts[i] [experts] says."""
    import deep_gemm
    import torch

    num_experts = counts.shape[1]
    assignments = int(counts[0].sum())
    masked = layout == "masked"
    if masked:
        capacity = (tokens // 256 + 1) * 256
        shape = (num_experts, capacity)
        who = torch.from_numpy(counts.astype(np.int32)).cuda()
        tail = (-(-assignments // num_experts),)
    else:
        alignment = int(layout.split()[1])
        shape = (layouts.contiguous_rows(assignments, num_experts, alignment),)
        who = torch.from_numpy(np.stack([m_indices(c, alignment, *shape) for c in counts])).cuda()
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        tail = ()
    weights = [(as_torch(w.values), as_torch(w.scales)) for w in _pair(params)]
    fp8 = weights[0][1] is not None
    width_in = max(w.shape[2] for w, _ in weights)
    width_out = max(w.shape[1] for w, _ in weights)
    num_rows = int(np.prod(shape))
    need = num_rows * (width_in * (1 if fp8 else 2) + 2 * width_out)
    free = torch.cuda.mem_get_info()[0]
    if need > 0.9 * free:
        raise MemoryError(f"needs {need} bytes, {free} are free")
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    # The widest input and output of the two, of which both take their part.
    source = torch.empty(num_rows * width_in, dtype=dtype, device="cuda")
    target = torch.empty(num_rows * width_out, dtype=torch.bfloat16, device="cuda")
    calls = []
    for values, scales in weights:
        out_width, in_width = values.shape[1:]
        a = source[: num_rows * in_width].view(*shape, in_width)
        _fill(a, int(counts.max()) if masked else shape[0])
        out = target[: num_rows * out_width].view(*shape, out_width)
        if fp8:
            groups = torch.full((*shape[:-1], in_width // 128, shape[-1]), 0.01, device="cuda")
            a, values = (a, groups.transpose(-1, -2)), (values, scales)
        calls.append((a, values, out))
    kind = "fp8_fp4" if fp8 else "bf16"
    gemm = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_{layout.split()[0]}")

    def call(i: int) -> None:
        for a, b, out in calls:
            gemm(a, b, out, who[i], *tail)

    return call


def _pair(params: dg.MoEParams) -> tuple[dg.Scaled, dg.Scaled]:
    return params.experts.w13, params.experts.w2


def _fill(a: Any, rows: int) -> None:
    """Random numbers in the first `rows` rows (of every slab), the same few thousand again."""
    import torch

    chunk = torch.randn(min(rows, 1024), a.shape[-1], device="cuda", dtype=torch.bfloat16)
    chunk = (chunk * 64).to(a.dtype).view(torch.uint8)
    a = a.view(torch.uint8)
    for start in range(0, rows, len(chunk)):
        part = a[..., start : min(start + len(chunk), rows), :]
        part.copy_(chunk[: part.shape[-2]])


def m_indices(counts: np.ndarray, alignment: int, rows: int) -> np.ndarray:
    """The expert of each of `rows` rows, -1 for padding; each expert starts at an aligned row."""
    out = np.full(rows, -1, np.int32)
    start = 0
    for expert, count in enumerate(counts):
        out[start : start + count] = expert
        start += -(-int(count) // alignment) * alignment
    return out


def ragged_dot(cfg: dg.MoEConfig, params: dg.MoEParams, work: Work) -> dict:
    """jax.lax.ragged_dot twice, on bf16 rows sorted by expert: its time, or why there is none."""

    def none(reason: str) -> dict:
        return {"ragged_dot_us": None, "ragged_dot_skipped": reason}

    layers, tokens, top_k = work.ids.shape
    rows = tokens * top_k
    if cfg.recipe != "bf16":
        return none("takes bf16 weights: recipe bf16 only")
    # XLA masks the rows once for every expert where it has no grouped kernel.
    need = 2 * cfg.num_experts * rows * max(cfg.hidden_size, 2 * cfg.intermediate_size)
    if need > MOST_RAGGED_BYTES:
        return none(f"XLA's {cfg.num_experts} masked copies of its rows would take {need} bytes")
    sizes = jnp.stack([jnp.bincount(i.ravel(), length=cfg.num_experts) for i in work.ids])
    a13, a2 = (
        jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
        for width in (cfg.hidden_size, cfg.intermediate_size)
    )

    @jax.jit
    def run(a13, a2, sizes, w13, w2):
        dot = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.bfloat16)

        def step(carry, sizes):
            return carry, (
                dot(a13, w13.swapaxes(1, 2), sizes)[:8],
                dot(a2, w2.swapaxes(1, 2), sizes)[:8],
            )

        return jax.lax.scan(step, 0, sizes)[1]

    w13, w2 = (w.values for w in _pair(params))
    try:
        us = _bench.median_us(lambda: run(a13, a2, sizes, w13, w2), repeats=10) / layers
    except Exception as problem:
        return none(why(problem))
    return {"ragged_dot_us": us}
