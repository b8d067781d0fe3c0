"""Time per kernel inside a jitted call, as the GPU's own profiler (through JAX's) saw it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax


def stages(call: Callable[[], object], calls: int = 20) -> list[dict]:
    """Kernels of one `call`, in order: see `summary`. Raises RuntimeError where no GPU runs."""
    return summary([event for gpu in profile(call, calls) for event in gpu], calls)


def profile(call: Callable[[], object], calls: int) -> list[list[tuple[float, float, str]]]:
    """(start, duration, name) in ns of the kernels of `calls` calls, a list for each GPU."""
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"kernel times need a GPU; JAX runs on {jax.default_backend()}")
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(calls)])
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        gpus = [
            [
                (event.start_ns, event.duration_ns, event.name)
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
        ]
    if not any(gpus):
        lines = [(plane.name, [line.name for line in plane.lines]) for plane in data.planes]
        raise RuntimeError(f"the profile holds no kernels: {lines}")
    return gpus


def overlap_us(events: list[tuple[float, float, str]]) -> float:
    """Microseconds of the events of one GPU that ran beside others."""
    busy, end = 0.0, 0.0
    for start, duration, _ in sorted(events):
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return (sum(duration for _, duration, _ in events) - busy) / 1e3


def summary(events: list[tuple[float, float, str]], calls: int) -> list[dict]:
    """One entry per kernel name, in order of its first start, of `calls` equal calls.

    events: (start, duration, name) in ns. us: per call, launches of that name together;
    gap_us: idle time before them (by median, so that the pauses between calls do not count).
    """
    kernels: dict[str, list[tuple[float, float]]] = {}
    end = None
    for start, duration, name in sorted(events):
        gap = 0.0 if end is None else max(0.0, start - end)
        kernels.setdefault(name, []).append((duration, gap))
        end = start + duration if end is None else max(end, start + duration)
    return [
        {
            "kernel": name,
            "launches": len(seen) / calls,
            "us": sum(duration for duration, _ in seen) / calls / 1e3,
            "gap_us": statistics.median(gap for _, gap in seen) * len(seen) / calls / 1e3,
        }
        for name, seen in kernels.items()
    ]
