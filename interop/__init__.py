"""What connects this package to other libraries; each module imports its library when it is used.

``deep_gemm``: DeepGEMM's GEMMs inside ``jax.jit``, through ``bridge``. ``emulator``: the same calls
on a CPU. ``scales``: scales in the layouts that DeepGEMM reads.
"""
