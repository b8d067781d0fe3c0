"""One predicate per constraint on arrays; each raises with what came and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp


def shape(name: str, array, expected: Sequence[int | None]) -> None:
    """`array.shape` equals `expected`, None standing for any size."""
    got = tuple(array.shape)
    if len(got) != len(expected) or any(
        e is not None and g != e for g, e in zip(got, expected, strict=True)
    ):
        want = ", ".join("*" if e is None else str(e) for e in expected)
        raise ValueError(f"{name}: shape {got}, must be ({want})")


def dtype(name: str, array, allowed: Sequence[str]) -> None:
    """`array.dtype` is one of `allowed` (names)."""
    if jnp.dtype(array.dtype).name not in allowed:
        raise TypeError(
            f"{name}: dtype {jnp.dtype(array.dtype).name}, must be {' or '.join(allowed)}"
        )


def tokens(x, hidden_size: int) -> None:
    """x is [T, H] bf16."""
    shape("x", x, (None, hidden_size))
    dtype("x", x, ("bfloat16",))


def routing(topk_ids, topk_weights, num_tokens: int) -> None:
    """topk_ids and topk_weights are [T, k] int32 and f32."""
    shape("routing.topk_ids", topk_ids, (num_tokens, None))
    shape("routing.topk_weights", topk_weights, topk_ids.shape)
    dtype("routing.topk_ids", topk_ids, ("int32",))
    dtype("routing.topk_weights", topk_weights, ("float32",))
