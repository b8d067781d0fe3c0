"""What the benches share: what ran, timing, peak rates, and lines of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

PEAK_FLOPS = {"bf16": 0.7e15} | dict.fromkeys(("fp8_block", "mxfp8", "mxfp4"), 1.4e15)
PEAK_BYTES = 4.3e12
"""What one H200 reaches: dense matrix rate by recipe, device-to-device copy rate (read + write)."""
LINK_BYTES = 450e9
"""A second in each direction, an H100's or H200's NVLink."""


PACKAGES = ("jax", "jaxlib", "torch", "sgl-deep-gemm", "jax-tvm-ffi", "apache-tvm-ffi", "sglang")


def package_version(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict:
    """GPU and versions, as every line of bench/*.jsonl carries them."""
    found = {package: package_version(package) for package in PACKAGES}
    versions = {"python": sys.version.split()[0]} | {p: v for p, v in found.items() if v}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": jax.devices()[0].device_kind,
        "versions": versions,
        "command": command(),
    }


def command() -> str:
    """The command line without where its lines went, which is a path of one machine."""
    kept, words = ["python"], iter(sys.argv)
    for word in words:
        if word == "--out":
            next(words)
        else:
            kept.append(word)
    return " ".join(kept)


def median_us(call: Callable[[], object], *, repeats: int = 20, warmups: int = 3) -> float:
    """Median wall time of `call` until its result is ready, in microseconds."""
    for _ in range(warmups):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def programs_queued(num_tokens: int) -> int:
    """Programs of several layers that are timed in a row, of ours and of the controls alike: as
    many as hide what a program's start costs the host.

    As many, too, because longer rows are slower ones: on an H200 one layer of SGLang's (E 32, H
    7168, I 2048, 1024 tokens) took 798 us in rows of 4 layers and 897 in rows of 32.
    """
    return 2 if num_tokens <= 64 else 16 if num_tokens <= 4096 else 4


def copy_bytes_per_s(num_bytes: int = 2**32) -> float:
    """Rate of a device-to-device copy, counting bytes read and written."""
    source = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    copy = jax.jit(jnp.copy)
    return 2 * num_bytes / median_us(lambda: copy(source), repeats=10) * 1e6


def append(path: Path, record: dict) -> None:
    """Add one line to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
