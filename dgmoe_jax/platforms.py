"""Refusing, while it is lowered, a program for a platform that it cannot run on.

Only lowering knows the platform: a machine without a GPU may trace and lower for one.
"""

from __future__ import annotations

import functools

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_only_on_p = Primitive("dgmoe_only_on")
_only_on_p.def_abstract_eval(lambda x, **_: x)


@functools.partial(jax.jit, static_argnames=("platform", "otherwise"), inline=True)
def only_on(x: Array, platform: str, otherwise: str) -> Array:
    """x itself; lowered for another platform ("cuda", "cpu"): NotImplementedError(otherwise)."""
    return _only_on_p.bind(x, platform=platform, otherwise=otherwise)


def _lower(ctx, x, *, platform: str, otherwise: str):
    platforms = ctx.module_context.platforms
    if any(p != platform for p in platforms):
        raise NotImplementedError(f"lowering for {', '.join(platforms)}: {otherwise}")
    return [x]


mlir.register_lowering(_only_on_p, _lower)
batching.primitive_batchers[_only_on_p] = lambda args, dims, **params: (
    _only_on_p.bind(*args, **params),
    dims[0],
)
