"""What connects this package to other libraries; each module imports its library when it is used.

``to_jax``, ``to_torch``: tensors, not copied. ``TorchMoE``, ``replace_moe_blocks``: the layer as a
torch module, and in a transformers model. ``deep_gemm``: DeepGEMM's GEMMs inside ``jax.jit``,
through ``bridge``. ``emulator``: the same calls on a CPU. ``scales``: scales in the layouts that
DeepGEMM reads. ``parity``: the layer against others', step by step. ``sglang``: SGLang's runner.
"""

import importlib

_LAZY = {
    "to_jax": "dlpack",
    "to_torch": "dlpack",
    "TorchMoE": "torch_moe",
    "replace_moe_blocks": "torch_moe",
}

__all__ = [*_LAZY]


def __getattr__(name):
    # The torch module imports the layer, which imports what lies here.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
