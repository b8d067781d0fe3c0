"""The one registry of implementations: (step, backend) -> function, imported when first used.

Every implementation of a step has the same signature: flat arrays in, flat arrays out.
A backend that is named is used or refused with the reason; nothing is replaced in silence.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import jax
from jax import Array

from dgmoe_jax.config import BACKENDS
from dgmoe_jax.platforms import only_on

_PALLAS = {
    "route": "route:route",
    "permute_index": "permute_index:permute_index",
    "permute": "permute:permute",
    "quant": "quant:quant",
    "act": "act_quant:act",
    "act_quant": "act_quant:act_quant",
    "unpermute": "unpermute:unpermute",
    "requant": "requant:requant",
    "gemm": "gemm:gemm",
    "gemm_act_quant": "gemm:gemm_act_quant",
}


def _load(path: str) -> Callable:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"dgmoe_jax.{module}"), name)


@functools.cache
def get(step: str, backend: str) -> Callable:
    """The implementation of `step` that `backend` means.

    "xla" is jnp throughout, "pallas" Mosaic GPU kernels throughout. "deep_gemm" is DeepGEMM for
    the GEMMs and Pallas for the rest; "emulator" is those two on a CPU: the kernels in interpret
    mode, and a numpy emulator in DeepGEMM's place.
    """
    if step not in _PALLAS:
        raise ValueError(f"step={step!r}: must be one of {tuple(_PALLAS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {BACKENDS}")
    if step == "gemm_act_quant" and backend != "pallas":
        raise NotImplementedError(f"step={step!r}: 'pallas' has it, {backend!r} has not")
    if backend == "xla":
        return _load(f"xla:{step}")
    if step == "gemm" and backend in ("deep_gemm", "emulator"):
        return functools.partial(_load("interop.deep_gemm:gemm"), emulate=backend == "emulator")
    return functools.partial(
        _load(f"kernels_pallas.{_PALLAS[step]}"), interpret=backend == "emulator"
    )


def pallas_tiling(expected_rows: float, *, fp8: bool) -> tuple[int, int, bool]:
    """(alignment, tile, fused) of our grouped GEMM for the rows an expert is expected to get."""
    tile, alignment = _load("kernels_pallas.gemm:tile_for")(expected_rows)
    return alignment, tile, _load("kernels_pallas.gemm:fuses")(fp8=fp8)


def exchange() -> Callable:
    """Rows written into the memory of other GPUs, by a kernel of ours; see its docstring."""
    return _load("kernels_pallas.one_sided:exchange")


def exchange_unavailable(mesh: jax.sharding.Mesh) -> str | None:
    """Why `exchange` cannot run over a mesh of GPUs, or None where it can."""
    return _load("kernels_pallas.one_sided:unavailable")(mesh)


def only_where_it_runs(x: Array, backend: str, dispatch: str = "standard") -> Array:
    """x itself; lowered for a platform that `backend` or `dispatch` does not run on:
    NotImplementedError."""
    if dispatch == "one_sided" and backend != "emulator":
        x = only_on(
            x,
            "cuda",
            "dispatch='one_sided' needs NVIDIA GPUs that write into each other's memory;"
            " 'all_to_all' runs anywhere",
        )
    if backend in ("pallas", "deep_gemm"):
        return only_on(
            x,
            "cuda",
            f"backend={backend!r} needs an NVIDIA GPU; 'xla' runs anywhere, 'emulator' runs the"
            " GPU kernels in interpret mode on a CPU",
        )
    if backend == "emulator":
        return only_on(x, "cpu", "backend='emulator' runs on a CPU only")
    return x


def current_arch() -> str:
    """The default device as `plan` names it: "cpu", "sm90", "sm100", ..., or "gpu" if unknown."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return "cpu"
    capability = str(getattr(device, "compute_capability", ""))
    return f"sm{capability.replace('.', '')}" if capability.replace(".", "").isdigit() else "gpu"


def free_bytes() -> int | None:
    """Memory that the default device has left for this process, or None where it does not say, and
    where several processes must decide alike, whose devices have not all the same."""
    if jax.process_count() > 1:
        return None
    stats = jax.local_devices()[0].memory_stats() or {}
    if not {"bytes_limit", "bytes_in_use"} <= stats.keys():
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def deep_gemm_unavailable() -> str | None:
    """Why DeepGEMM cannot run in this process, or None if it can."""
    from dgmoe_jax.interop import deep_gemm

    return deep_gemm.availability()
