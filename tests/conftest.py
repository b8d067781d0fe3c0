"""What the suites share: random layers, the float64 oracle, and the backends to run on.

`BACKENDS` are those that can run here: on a CPU "xla" and "emulator" (the GPU kernels in interpret
mode, slow: small shapes only), on a GPU "xla", "deep_gemm" and "pallas".
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

# Kernels in interpret mode wait for each other in callbacks, on XLA's own threads: on a small CPU
# none may be left for an operation that XLA splits among them.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import dgmoe_jax as dg
from dgmoe_jax import backends, reference
from dgmoe_jax.plan import dense
from dgmoe_jax.recipes import BY_BACKEND, Format, padded, run_of, target
from dgmoe_jax.steps import experts, permute

# Kernels in interpret mode call JAX from callbacks. These hang if JAX, which has few threads on a
# small CPU, meanwhile runs ahead with something else.
jax.config.update("jax_cpu_enable_async_dispatch", False)

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
BACKENDS = ("xla", "deep_gemm", "pallas") if ON_GPU else ("xla", "emulator")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_layout = pytest.mark.parametrize("layout", ["contiguous", "masked"])
every_recipe = pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])

TOP_2 = dg.RouterConfig(top_k=2)
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

    @property
    def activations(self) -> Format:
        return run_of(self.cfg.recipe, self.params.experts.w13.format).operands.activations

    @functools.cached_property
    def decoded(self) -> tuple[np.ndarray, ...]:
        """w13, w2 and, if there are, the shared experts' as the GEMMs read them, in f64."""
        experts, shared = self.params.experts, self.params.shared
        operands = [experts.w13, experts.w2] + ([shared.w13, shared.w2] if shared else [])
        return tuple(f64(jax.jit(dg.dequantize)(w)) for w in operands)

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
        if prepared:
            x = np.pad(x, ((0, 0), (0, padded(hidden) - hidden)))
            w13, w2, *shared = self.decoded
            shared = [w[0] for w in shared] or [None, None]
        else:
            names = ("w13", "w2", "shared_w13", "shared_w2")
            w13, w2, *shared = (f64(self.raw.get(name)) for name in names)
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


def make_layer(
    raw: dict[str, Any], *, inner: int, router: dg.RouterConfig, arch: str | None = None, **cfg
) -> Layer:
    num_experts, hidden = raw["gate_weight"].shape
    cfg = dg.MoEConfig(
        num_experts=num_experts, hidden_size=hidden, intermediate_size=inner, router=router, **cfg
    )
    return Layer(cfg, raw, dg.prepare_params(raw, cfg, arch=arch))


def shared_by_tests(build):
    """Prepared once for all backends and tests: leave the result be."""
    once = functools.lru_cache(maxsize=16)(build)

    @functools.wraps(build)
    def on(*, backend: str = "xla", layout: str = "auto", arch: str | None = None, **kw) -> Layer:
        arch = arch or target(backends.current_arch(), backend)
        recipe = kw.get("recipe", "bf16")
        if recipe in ("bf16", "fp8_block") and arch == "sm90":
            arch = None  # the same as elsewhere
        if (recipe, arch, "auto") in BY_BACKEND:
            kw["backend"] = backend
        layer = once(arch=arch, **kw)
        cfg = dataclasses.replace(layer.cfg, backend=backend, layout=layout)
        return dataclasses.replace(layer, cfg=cfg)

    return on


@shared_by_tests
def random_layer(
    *,
    experts: int = 4,
    hidden: int = 128,
    inner: int = 128,
    shared: int = 0,
    bias: bool = False,
    router: dg.RouterConfig = TOP_2,
    seed: int = 0,
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
    return make_layer(raw, inner=inner, router=router, num_shared_experts=shared, **cfg)


@shared_by_tests
def exact_layer(*, shared: int = 0, scaling_factor: float = 1.0, **cfg) -> Layer:
    """4 experts of 128 x 128 whose arithmetic, with `exact_tokens`, is exact in f32 in any order.

    Each FP8 group and block has an amax of 448 times a power of two, so its scale is one. Gates
    are 448 times a power of two, its negative, or 0: silu gives the gate or nothing, exactly.
    """
    rng = np.random.default_rng(7)

    def expert(power):
        w13 = np.zeros((2, 128, 128))
        gate, up = w13
        gate[:, 0] = rng.choice([448, 448, 0, -448], 128)
        gate[:8, 0] = [448, 448, 448, 0, 0, 448, -448, -448]
        up[1:, 4:] = rng.integers(-1, 2, (127, 124))
        up[0, 1] = 256  # above every other up, so the activation's amax is gate[0] * up[0]
        up[5, 3] = 448  # the block's amax; the tokens are 0 there
        w2 = rng.integers(-2, 3, (128, 128)).astype(float)
        w2[3, 7] = 448  # the block's amax; gate 7 is off
        return w13.reshape(256, 128) * 2.0**power, w2 * 2.0**-power

    w13, w2 = zip(*(expert(e % 3) for e in range(4)), strict=True)
    raw = {"gate_weight": np.zeros((4, 128)), "w13": np.stack(w13), "w2": np.stack(w2)}
    if shared:
        raw["shared_w13"], raw["shared_w2"] = expert(1)
    raw = {name: np.asarray(w).astype(ml_dtypes.bfloat16) for name, w in raw.items()}
    router = dg.RouterConfig(top_k=2, scaling_factor=scaling_factor)
    return make_layer(raw, inner=128, router=router, num_shared_experts=shared, **cfg)


def exact_tokens(count: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).integers(-2, 3, (count, 128)).astype(float)
    x[:, :4] = [1, 1, 448, 0]
    return (x * 2.0 ** (np.arange(count)[:, None] % 2)).astype(ml_dtypes.bfloat16)


def rounded_oracle(layer: Layer, x, ids, weights) -> np.ndarray:
    """The oracle that rounds where the recipe rounds: exactly, and nowhere else (f64)."""
    fmt, recode = layer.activations, bf16
    if fmt.group:
        how = dict(group=fmt.group[1], ue8m0=fmt.ue8m0)
        recode = lambda a: reference.decode_fp8(*reference.encode_fp8(a, **how), fmt.group[1])  # noqa: E731
    return bf16(layer.oracle(x, ids, weights, prepared=True, between=recode, gemm_out=bf16))


def tokens(count: int, hidden: int, seed: int = 100) -> np.ndarray:
    return gaussian(np.random.default_rng(seed), count, hidden)


def random_ids(seed: int, count: int, top_k: int, experts: int) -> np.ndarray:
    """Distinct within a row."""
    rng = np.random.default_rng(seed)
    return rng.random((count, experts)).argsort(axis=1)[:, :top_k].astype(np.int32)


@functools.partial(
    jax.jit,
    static_argnames=(
        *("step", "backend", "num_experts", "rows", "capacity", "with_m_indices", "group", "ue8m0"),
        *("packed", "width", "keep_fp32", "recipe_a", "recipe_b"),
        *("alignment", "tile", "slabs", "expected_m", "activation", "params", "scaling_factor"),
    ),
)
def run_step(*args, step: str, backend: str, **kw):
    """One step on its own, compiled as it is inside the layer."""
    return backends.get(step, backend)(*args, **kw)


def tanh_error(kind: str, backend: str) -> float:
    """How far from f64, relatively, an activation may be for the sake of the hardware's tanh."""
    return 2**-10 if kind == "situ" and backend != "xla" and ON_GPU else 0.0


def live_rows(tiles, rows: int) -> np.ndarray:
    """[rows] int: the expert of each live row, -1 for every other."""
    owner = np.full(rows, -1)
    for expert, first, count in np.asarray(tiles).T:
        owner[first : first + count] = expert
    return owner


def row_scales(scales, slabs: int, rows: int, groups: int | None = None) -> np.ndarray | None:
    """[slabs * G, S] -> [rows, G]; int32, [slabs * ceil(G / 4), S], is UE8M0, of `groups`."""
    if scales is None:
        return None
    scales = np.asarray(scales).reshape(slabs, -1, scales.shape[1])[:, :, : rows // slabs]
    scales = np.ascontiguousarray(scales.transpose(0, 2, 1)).reshape(rows, -1)
    if scales.dtype != np.int32:
        return scales
    exponents = scales.view(np.uint8).astype(float)
    return np.where(exponents == 255, np.nan, np.exp2(exponents - 127))[:, :groups]


@dataclasses.dataclass
class Walk:
    """Everything that the layer's steps hand to each other, in order (numpy).

    `owner` [rows]: the expert of each live row, -1 elsewhere. The scales of rows are [rows, G].
    """

    src2dst: np.ndarray
    owner: np.ndarray
    rows: tuple
    gateup: np.ndarray
    inner: tuple
    out: np.ndarray
    shared: np.ndarray | None
    y: np.ndarray


def walk(layer: Layer, x, ids, weights, backend: str, *, poison: float | None = None) -> Walk:
    """The layer without its router, step by step, by the steps' own functions.

    With `poison`, all that no step may read holds it before the next step runs: rows that are not
    live and their scales, scales past the last row, and the weights of experts that no token chose.
    """
    fmt, cfg = layer.activations, layer.cfg
    decision = dg.plan(cfg, len(x), top_k=np.shape(ids)[1], distinct_ids=False)
    run_gemm = jax.jit(experts.gemm, static_argnames=("fmt", "plan"))
    run_activate = jax.jit(experts.activate, static_argnames=("activation", "fmt", "plan"))

    worst_exponents = np.int32(-1) if poison is None or np.isnan(poison) else np.int32(0x7EFEFEFE)

    def spoil(array, dead):
        if poison is None or array is None:
            return array
        array = np.array(array)
        # float8_e4m3fn has neither 3e38 nor an infinity: its largest value stands in.
        if array.dtype.kind in "iu":  # FP4, and UE8M0's NaN or largest
            array[dead] = 0x77 if array.dtype.itemsize == 1 else worst_exponents
            return array
        array[dead] = min(poison, 448.0) if array.dtype.itemsize == 1 else poison
        return array

    def spoil_scales(scales, slabs, dead):
        if poison is None or scales is None:
            return scales
        capacity = len(dead) // slabs
        spoilt = np.array(scales).reshape(slabs, -1, scales.shape[1])
        worst = worst_exponents if spoilt.dtype == np.int32 else poison
        spoilt[:, :, capacity:] = worst
        spoilt.transpose(0, 2, 1)[:, :capacity][dead.reshape(slabs, capacity)] = worst
        return spoilt.reshape(scales.shape)

    def spoil_rows(rows, slabs):
        dead = live_rows(rows.tiles, len(rows.values)) < 0
        values, scales = spoil(rows.values, dead), spoil_scales(rows.scales, slabs, dead)
        return dataclasses.replace(rows, values=values, scales=scales)

    def run_experts(rows, block, plan):
        owner = live_rows(rows.tiles, len(rows.values))
        unused = ~np.isin(np.arange(len(block.w13.values)), owner)

        def gemm(rows, w):
            values, scales = spoil(w.values, unused), spoil(w.scales, unused)
            w = dataclasses.replace(w, values=values, scales=scales)
            return spoil(run_gemm(rows, w, fmt=fmt, plan=plan), owner < 0)

        gateup = gemm(rows, block.w13)
        inner = run_activate(gateup, rows, activation=cfg.activation, fmt=fmt, plan=plan)
        inner = spoil_rows(inner, plan.slabs)
        return gateup, inner, gemm(inner, block.w2)

    x = np.pad(np.asarray(x), ((0, 0), (0, padded(cfg.hidden_size) - cfg.hidden_size)))
    place = functools.partial(permute.permute, fmt=fmt, num_experts=cfg.num_experts, plan=decision)
    rows, src2dst = jax.jit(place)(jnp.asarray(x), jnp.asarray(ids, jnp.int32))
    rows = spoil_rows(rows, decision.slabs)
    gateup, inner, out = run_experts(rows, layer.params.experts, decision)
    shared = None
    if layer.params.shared is not None:
        alone = dense(decision, len(x), cfg.recipe)
        in_place = jax.jit(functools.partial(permute.in_place, fmt=fmt, plan=alone))
        every_row = spoil_rows(in_place(jnp.asarray(x)), 1)
        shared = run_experts(every_row, layer.params.shared, alone)[-1][: len(x)]
    y = run_step(
        jnp.asarray(out),
        src2dst,
        jnp.asarray(weights, jnp.float32),
        None if shared is None else jnp.asarray(shared),
        step="unpermute",
        backend=backend,
        scaling_factor=cfg.router.scaling_factor,
    )

    def flat(rows):
        groups = fmt.group and rows.values.shape[1] // fmt.group[1]
        scales = row_scales(rows.scales, decision.slabs, decision.rows, groups)
        return np.asarray(rows.values), scales

    return Walk(
        np.asarray(src2dst),
        live_rows(rows.tiles, decision.rows),
        flat(rows),
        np.asarray(gateup),
        flat(inner),
        np.asarray(out),
        None if shared is None else np.asarray(shared),
        np.asarray(y)[:, : cfg.hidden_size],
    )


def within_0_3_percent_on_its_own_bytes(layer: Layer, x, ids, weights, y, backend: str) -> None:
    """Each GEMM and the sum against f64 products of the bytes that it was given, dequantised; and
    `y`, the layer's result, is what these steps give, to the last bit."""
    steps = walk(layer, x, ids, weights, backend)
    live, group = steps.owner >= 0, layer.activations.group
    w13, w2, *_ = layer.decoded

    def product(operand, w):
        values, scales = operand
        rows = f64(values) if group is None else reference.decode_fp8(values, scales, group[1])
        out = np.zeros((len(rows), w.shape[1]))
        for e in np.unique(steps.owner[live]):
            out[steps.owner == e] = rows[steps.owner == e] @ w[e].T
        return out

    gateup, out = product(steps.rows, w13), product(steps.inner, w2)
    assert error(steps.gateup[live], gateup[live]) < 0.003
    assert error(steps.out[live], out[live]) < 0.003
    want = (
        np.einsum("tk,tkh->th", f64(weights), out[steps.src2dst]) * layer.cfg.router.scaling_factor
    )
    if steps.shared is not None:
        want += f64(steps.shared)
    assert error(steps.y, want[:, : layer.cfg.hidden_size]) < 0.003
    same_bits(y, steps.y)
