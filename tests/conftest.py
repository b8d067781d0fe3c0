"""What the suites share: random layers, the float64 oracle, and the backends to run on.

`BACKENDS` are those that can run here: on a CPU "xla" and "emulator" (the GPU kernels in interpret
mode, slow: small shapes only), on a GPU "xla" and "deep_gemm".
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import dgmoe_jax as dg
from dgmoe_jax import backends, plan, reference
from dgmoe_jax.recipes import RECIPES, padded

# Reproducible in CI; the first example of each shape compiles, which is slow by design.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("suite")

ON_GPU = jax.default_backend() == "gpu"
BACKENDS = ("xla", "deep_gemm" if ON_GPU else "emulator")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_recipe = pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])

moe_layer = jax.jit(dg.moe_layer, static_argnames=("cfg", "plan"))


def f64(array) -> np.ndarray | None:
    return None if array is None else np.asarray(array).astype(np.float64)


def bits(array) -> np.ndarray:
    """The bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def same_bits(got, want) -> None:
    np.testing.assert_array_equal(bits(got), bits(want))


def error(got, want) -> float:
    """Relative error in the Frobenius norm."""
    got, want = f64(got), f64(want)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def bf16(array):
    """Rounds to bf16 and back to f64."""
    return np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float64)


def gaussian(rng: np.random.Generator, *shape: int, scale: float = 1.0):
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return values.astype(ml_dtypes.bfloat16)


def routing(ids, weights=None) -> dg.Routing:
    ids = np.asarray(ids, np.int32)
    weights = np.ones(ids.shape) if weights is None else weights
    return dg.Routing(jnp.asarray(ids), jnp.asarray(weights, jnp.float32))


@dataclasses.dataclass
class Layer:
    """A layer with the weights it was prepared from."""

    cfg: dg.MoEConfig
    raw: dict[str, Any]
    params: dg.MoEParams

    def __call__(self, x, ids=None, weights=None, **kw) -> np.ndarray:
        if ids is not None:
            kw["routing"] = routing(ids, weights)
        return np.asarray(moe_layer(jnp.asarray(x), self.params, cfg=self.cfg, **kw))

    def reference_routing(self, x) -> tuple[np.ndarray, np.ndarray]:
        r = self.cfg.router
        return reference.route(
            (f64(x) @ f64(self.raw["gate_weight"]).T).astype(np.float32),
            self.raw.get("gate_bias"),
            scoring=r.scoring,
            top_k=r.top_k,
            num_groups=r.num_groups,
            top_groups=r.top_groups,
            renormalize=r.renormalize,
        )

    def oracle(self, x, ids, weights, *, prepared: bool = False, **kw) -> np.ndarray:
        """`reference.moe` on the raw weights, or on the `prepared` ones, dequantised."""
        x, hidden = f64(x), self.cfg.hidden_size
        w13, w2 = f64(self.raw["w13"]), f64(self.raw["w2"])
        shared = [f64(self.raw.get(f"shared_{name}")) for name in ("w13", "w2")]
        if prepared:
            x = np.pad(x, ((0, 0), (0, padded(hidden) - hidden)))
            w13, w2 = decoded(self.params.experts)
            if self.params.shared is not None:
                shared = [w[0] for w in decoded(self.params.shared)]
        kind, params = self.cfg.activation.params()
        return reference.moe(
            x,
            w13,
            w2,
            np.asarray(ids),
            np.asarray(weights),
            kind=kind,
            params=params,
            scaling_factor=self.cfg.router.scaling_factor,
            shared_w13=shared[0],
            shared_w2=shared[1],
            **kw,
        )[:, :hidden]


def decoded(weights: dg.ExpertWeights) -> tuple[np.ndarray, np.ndarray]:
    return f64(dg.dequantize(weights.w13)), f64(dg.dequantize(weights.w2))


def make_layer(raw: dict[str, Any], *, inner: int, router: dg.RouterConfig, **cfg) -> Layer:
    num_experts, hidden = raw["gate_weight"].shape
    cfg = dg.MoEConfig(
        num_experts=num_experts, hidden_size=hidden, intermediate_size=inner, router=router, **cfg
    )
    return Layer(cfg, raw, dg.prepare_params(raw, cfg))


def random_layer(
    seed: int = 0,
    *,
    experts: int = 8,
    hidden: int = 128,
    inner: int = 64,
    top_k: int = 2,
    shared: int = 0,
    bias: bool = False,
    router: dict[str, Any] | None = None,
    **cfg,
) -> Layer:
    """Gaussian weights scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    raw = {
        "gate_weight": gaussian(rng, experts, hidden, scale=hidden**-0.5),
        "w13": gaussian(rng, experts, 2 * inner, hidden, scale=hidden**-0.5),
        "w2": gaussian(rng, experts, hidden, inner, scale=inner**-0.5),
    }
    if bias:
        raw["gate_bias"] = rng.standard_normal(experts, np.float32) * np.float32(0.1)
    if shared:
        raw["shared_w13"] = gaussian(rng, 2 * shared * inner, hidden, scale=hidden**-0.5)
        raw["shared_w2"] = gaussian(rng, hidden, shared * inner, scale=(shared * inner) ** -0.5)
    router = dg.RouterConfig(top_k=top_k, **(router or {}))
    return make_layer(raw, inner=inner, router=router, num_shared_experts=shared, **cfg)


def tokens(count: int, hidden: int, seed: int = 100) -> np.ndarray:
    return gaussian(np.random.default_rng(seed), count, hidden)


def random_ids(seed: int, count: int, top_k: int, experts: int) -> np.ndarray:
    """Distinct within a row."""
    rng = np.random.default_rng(seed)
    return rng.random((count, experts)).argsort(axis=1)[:, :top_k].astype(np.int32)


@functools.partial(
    jax.jit,
    static_argnames=(
        *("step", "backend", "num_experts", "alignment", "rows", "group", "ue8m0"),
        *("activation", "params", "scaling_factor"),
    ),
)
def run_step(*args, step: str, backend: str, **kw):
    """One step on its own, compiled as it is inside the layer."""
    return backends.get(step, backend)(*args, **kw)


@dataclasses.dataclass
class Walk:
    """Everything that the layer's steps hand to each other, in order (numpy)."""

    encoded: tuple
    index: tuple
    rows: tuple
    gateup: np.ndarray
    inner: tuple
    out: np.ndarray
    y: np.ndarray


def walk(layer: Layer, x, ids, weights, backend: str, *, poison: float | None = None) -> Walk:
    """The routed part of the layer, step by step, by the steps' own functions.

    With `poison`, all that no step may read holds it before the next step runs: padding rows and
    their scales, scales past the last row, and the weights of experts that no token chose.
    """
    fmt, cfg = RECIPES[layer.cfg.recipe].activations, layer.cfg
    decision = plan(cfg, len(x), top_k=np.shape(ids)[1])
    kind, params = cfg.activation.params()

    def call(step, *args, **kw):
        args = [None if a is None else jnp.asarray(a) for a in args]
        return jax.tree.map(np.asarray, run_step(*args, step=step, backend=backend, **kw))

    def spoil(array, dead, axis=0):
        if poison is None or array is None:
            return array
        array = np.array(array)
        dead = np.pad(dead, (0, array.shape[axis] - len(dead)), constant_values=True)
        # float8_e4m3fn has neither 3e38 nor an infinity: its largest value stands in.
        array[(slice(None),) * axis + (dead,)] = (
            min(poison, 448.0) if array.dtype.itemsize == 1 else poison
        )
        return array

    def pair(values, scales, dead):
        return spoil(values, dead), spoil(scales, dead, axis=1)

    def operand(scaled):
        unused = ~np.isin(np.arange(cfg.num_experts), ids)
        return spoil(scaled.values, unused), spoil(scaled.scales, unused)

    quantise = dict(group=128, ue8m0=False)
    x = np.pad(np.asarray(x), ((0, 0), (0, padded(cfg.hidden_size) - cfg.hidden_size)))
    encoded = (x, None) if fmt.group is None else call("quant", x, **quantise)
    encoded = pair(*encoded, np.zeros(len(x), bool))
    index = call(
        "permute_index",
        np.asarray(ids, np.int32),
        num_experts=cfg.num_experts,
        alignment=decision.alignment,
        rows=decision.rows,
    )
    src2dst, dst2src, m_indices = index
    dead = m_indices < 0
    rows = pair(*call("permute_rows", *encoded, src2dst, dst2src), dead)
    gemm = dict(alignment=decision.alignment)
    gateup = spoil(call("gemm", *rows, *operand(layer.params.experts.w13), m_indices, **gemm), dead)
    if fmt.group is None:
        inner = call("act", gateup, m_indices, activation=kind, params=params), None
    else:
        inner = call("act_quant", gateup, m_indices, activation=kind, params=params, **quantise)
    inner = pair(*inner, dead)
    out = spoil(call("gemm", *inner, *operand(layer.params.experts.w2), m_indices, **gemm), dead)
    y = call(
        "unpermute",
        out,
        src2dst,
        np.asarray(weights, np.float32),
        None,
        scaling_factor=cfg.router.scaling_factor,
    )
    return Walk(encoded, index, rows, gateup, inner, out, y[:, : cfg.hidden_size])
