"""What this machine has, what of the layer runs on it and why not the rest, and what is missing."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import subprocess
from typing import Any

import jax
import jax.numpy as jnp

from dgmoe_jax import backends
from dgmoe_jax.config import BACKENDS, LAYOUTS, MoEConfig, RouterConfig
from dgmoe_jax.plan import plan
from dgmoe_jax.recipes import RECIPES

PACKAGES = ("jax", "jaxlib", "torch", "sgl-deep-gemm", "apache-tvm-ffi", "jax-tvm-ffi", "ninja")
NEEDED = {"cpu": ("apache-tvm-ffi", "jax-tvm-ffi", "ninja"), "gpu": PACKAGES}
TOKENS = 16  # any number of tokens plans alike


def examine() -> dict[str, Any]:
    """What `python -m dgmoe_jax doctor` prints; compiles nothing.

    machine: name -> text, None where nothing was found. runs: recipe, backend, layout and
    `why_not`, None where it runs. install: the one line that adds what is missing, or None.
    ok: the layer runs here in some way.
    """
    from dgmoe_jax.interop import kernel_cache

    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv")
    machine = {"platform": f"Python {platform.python_version()}, {platform.platform()}"}
    machine |= {"GPU": gpus and "; ".join(gpus[1:]), "devices of JAX": _devices()}
    machine |= {name: _version(name) for name in PACKAGES}
    compiler = _output(os.environ.get("CXX", "c++").split()[0], "--version")
    nvcc = _output(os.environ.get("DG_JIT_NVCC_COMPILER") or _nvcc(), "--version")
    machine |= {
        "C++ compiler": compiler and compiler[0],
        "nvcc": nvcc and next((line for line in nvcc if "release" in line), nvcc[0]),
    }
    machine["caches"] = "; ".join(
        f"{path}, {kernel_cache.size_bytes(path) / 1e6:.1f} MB"
        for path in kernel_cache.directories()
    )
    runs, on_gpu = [], False
    if not machine["devices of JAX"].startswith("none"):
        on_gpu = backends.current_arch() != "cpu"
        choices = itertools.product(RECIPES, BACKENDS, LAYOUTS[1:])
        runs = [
            {"recipe": recipe, "backend": backend, "layout": layout}
            | {"why_not": why_not(recipe, backend, layout)}
            for recipe, backend, layout in choices
        ]
    ok = any(run["why_not"] is None for run in runs)
    return {"ok": ok, "machine": machine, "runs": runs, "install": _install(machine, on_gpu)}


def why_not(recipe: str, backend: str, layout: str) -> str | None:
    """Why the default device does not run this choice, as `plan` and the backends say, or None."""
    from dgmoe_jax.interop import deep_gemm

    router = RouterConfig(top_k=2)
    cfg = MoEConfig(8, 256, 256, router, recipe=recipe, layout=layout, backend=backend)
    try:
        plan(cfg, TOKENS)
        jax.jit(backends.only_where_it_runs, static_argnums=1).lower(jnp.zeros(1), backend)
    except NotImplementedError as problem:
        return str(problem)
    if backend == "deep_gemm":
        return deep_gemm.availability()
    return deep_gemm.emulator_availability() if backend == "emulator" else None


def _devices() -> str:
    try:
        kinds = sorted({device.device_kind for device in jax.devices()})
    except RuntimeError as problem:  # a plugin that finds no driver
        return f"none: {problem}"
    return f"{len(jax.devices())} x {', '.join(kinds)}, {backends.current_arch()}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> list[str] | None:
    """The lines that it prints, or None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines() or None if done.returncode == 0 else None


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return f"{home}/bin/nvcc" if home else "nvcc"


def _install(machine: dict[str, str | None], on_gpu: bool) -> str | None:
    if machine["GPU"] and not on_gpu:
        return "pip install 'jax[cuda13]' 'dgmoe_jax[gpu]'"
    missing = [name for name in NEEDED["gpu" if on_gpu else "cpu"] if not machine[name]]
    # The extra says which versions go together.
    packages = "'dgmoe_jax[gpu]'" if on_gpu else " ".join(missing)
    steps = [f"pip install {packages}"] if missing else []
    if not machine["C++ compiler"]:
        steps.insert(0, "apt-get install g++")
    return " && ".join(steps) or None
