"""The one registry of implementations: (step, backend) -> function, imported when first used.

Every implementation of a step has the same signature: flat arrays in, flat arrays out.
A backend that is named is used or refused with the reason; nothing is replaced in silence.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

_PALLAS = {
    "route": "route:route",
    "permute_index": "permute:permute_index",
    "permute_rows": "permute:permute_rows",
    "quant": "quant:quant",
    "act": "act_quant:act",
    "act_quant": "act_quant:act_quant",
    "unpermute": "unpermute:unpermute",
}
STEPS = (*_PALLAS, "gemm")


def _load(path: str) -> Callable:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"dgmoe_jax.{module}"), name)


@functools.cache
def get(step: str, backend: str) -> Callable:
    """The implementation of `step` that `backend` means.

    "xla" is jnp throughout. "deep_gemm" is DeepGEMM for the GEMMs and Pallas for the rest.
    "emulator" is the same two, in interpret mode and against a numpy DeepGEMM, on a CPU.
    """
    if step not in STEPS:
        raise ValueError(f"step={step!r}: must be one of {STEPS}")
    if backend == "xla":
        return _load(f"xla:{step}")
    if step == "gemm":
        if backend == "pallas":
            raise NotImplementedError(
                "backend='pallas' has no grouped GEMM yet; 'deep_gemm' runs DeepGEMM's with"
                " Pallas kernels around it, 'xla' runs everywhere"
            )
        fn = _load("interop.deep_gemm:gemm")
        return functools.partial(fn, emulate=True) if backend == "emulator" else fn
    fn = _load(f"kernels_pallas.{_PALLAS[step]}")
    return functools.partial(fn, interpret=True) if backend == "emulator" else fn


def gate(x, backend: str):
    """x itself, refused when a program is lowered for a platform that `backend` does not run on.

    Only lowering knows the platform: a CPU may lower a program for a GPU that it does not have.
    """
    if backend == "xla":
        return x
    return _load("interop.deep_gemm:gate")(x, emulate=backend == "emulator")


def current_arch() -> str:
    """The default device as `plan` names it: "cpu", "sm90", "sm100", ..., or "gpu" if unknown."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        return "cpu"
    capability = str(getattr(device, "compute_capability", ""))
    return f"sm{capability.replace('.', '')}" if capability.replace(".", "").isdigit() else "gpu"


def deep_gemm_unavailable() -> str | None:
    """Why DeepGEMM cannot run in this process, or None if it can."""
    from dgmoe_jax.interop import deep_gemm

    return deep_gemm.availability()
