"""The Pallas kernels, on the CPU: values in Mosaic GPU interpret mode against NumPy, and lowering
for CUDA at the sizes they are made for."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dgmoe_jax.kernels_pallas import permute
from dgmoe_jax.kernels_pallas.act_quant import act, act_quant
from dgmoe_jax.kernels_pallas.permute import permute_index, permute_rows
from dgmoe_jax.kernels_pallas.quant import quant
from dgmoe_jax.kernels_pallas.route import route
from dgmoe_jax.kernels_pallas.unpermute import unpermute

BF16, FP8, F32, I32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32, jnp.int32
LARGEST = np.finfo(np.float32).max
POISON = [np.nan, 3e38]


def f32(x):
    return np.asarray(x).astype(np.float32)


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def custom_calls(fn, *shapes):
    """Kernels in the program that CUDA would get."""
    args = [None if s is None else jax.ShapeDtypeStruct(*s) for s in shapes]
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in lowered
    return lowered.count("stablehlo.custom_call")


# --- quant


def quant_reference(x, ue8m0=False):
    groups = f32(x).reshape(x.shape[0], -1, 128)
    with np.errstate(all="ignore"):
        scales = np.maximum(np.abs(groups).max(-1), np.float32(1e-10)) / np.float32(448)
        if ue8m0:
            bits = scales.view(np.int32)
            exponent = np.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254).astype(np.int32)
            rounded = (exponent << 23).view(np.float32)
            scales = np.where(np.isfinite(scales), rounded, scales)
        values = np.clip(groups / scales[..., None], np.float32(-448), np.float32(448))
        return values.astype(ml_dtypes.float8_e4m3fn).reshape(x.shape), scales.T


def assert_quantized(got, x, ue8m0=False):
    values, scales = got
    want_values, want_scales = quant_reference(x, ue8m0)
    m = x.shape[0]
    assert values.dtype == FP8 and scales.shape == (x.shape[1] // 128, -(-m // 4) * 4)
    np.testing.assert_array_equal(np.asarray(scales)[:, :m], want_scales)
    np.testing.assert_array_equal(f32(values), f32(want_values))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 384), (3, 128), (17, 256), (33, 128)])
def test_quant(m, k, ue8m0):
    x = random(m, m, k) * np.exp(3 * random(1, m, 1))
    x[0, :128] = 0
    if m > 4:
        x[1, 5], x[2, 30], x[3, 7], x[4, :128] = np.nan, np.inf, 3e38, 1e-30
    x = jnp.asarray(x, BF16)
    got = quant(x, ue8m0=ue8m0, interpret=True)
    assert_quantized(got, x, ue8m0)
    assert np.isfinite(np.asarray(got[1])[0, 0]) and np.asarray(got[1])[0, 0] > 0
    if m > 4:
        bad = np.isnan(f32(got[0])).any(axis=1)
        np.testing.assert_array_equal(np.flatnonzero(bad), [1, 2])


def test_quant_rounds_ties_to_even_and_divides_exactly():
    # Quotients that lie on, and an ulp beside, the midpoints between two e4m3 values.
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid) & (grid >= 0)])
    x = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    x = np.concatenate([x, np.full(-x.size % 127, 1, np.float32)]).reshape(-1, 127)
    x = np.concatenate([np.full((x.shape[0], 1), 448, np.float32), x], axis=1)
    x = jnp.asarray(np.concatenate([x * s for s in (1, 1.375, 0.0078)]), BF16)
    assert_quantized(quant(x, interpret=True), x)


def test_quant_lowers_for_cuda():
    for m, k in [(1, 384), (127, 640), (65536, 7168)]:
        for ue8m0 in (False, True):
            assert custom_calls(functools.partial(quant, ue8m0=ue8m0), ((m, k), BF16)) == 1


def test_quant_refuses():
    with pytest.raises(ValueError, match="129"):
        quant(jnp.zeros((2, 129), BF16))
    with pytest.raises(NotImplementedError, match="group=32"):
        quant(jnp.zeros((2, 128), BF16), group=32)


# --- act, act_quant

ACTIVATIONS = [
    ("silu", (None,)),
    ("silu", (2.0,)),
    ("oai_swiglu", (1.702, 7.0)),
    ("situ", (4.0, 8.0)),
]


def act_reference(gateup, activation, params):
    gate, up = np.split(f32(gateup).astype(np.float64), 2, axis=1)
    with np.errstate(all="ignore"):
        if activation == "situ":
            beta, linear = params
            return beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * linear * np.tanh(up / linear)
        alpha, limit = (1.0, params[0]) if activation == "silu" else params
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate / (1 + np.exp(-alpha * gate)) * (up + (activation == "oai_swiglu"))


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("activation", "params"), ACTIVATIONS)
def test_act(activation, params, poison):
    m, width = 24, 256
    gateup = 4 * random(0, m, 2 * width)
    m_indices = np.where(np.arange(m) % 8 < 5, 3, -1).astype(np.int32)
    m_indices[8:16] = -1  # a block that need not be visited
    live = m_indices >= 0
    gateup[~live] = poison
    args = (jnp.asarray(gateup, BF16), jnp.asarray(m_indices))
    kwargs = {"activation": activation, "params": params, "interpret": True}
    want = act_reference(args[0][live], activation, params)
    np.testing.assert_allclose(f32(act(*args, **kwargs))[live], want, rtol=5e-3, atol=1e-30)

    values, scales = act_quant(*args, **kwargs)
    amax = np.abs(want).reshape(-1, width // 128, 128).max(-1)
    np.testing.assert_allclose(np.asarray(scales)[:, :m][:, live], amax.T / 448, rtol=1e-5)
    back = f32(values)[live] * np.repeat(np.asarray(scales)[:, :m][:, live].T, 128, axis=1)
    np.testing.assert_allclose(back, want, rtol=2**-4, atol=float(amax.max()) / 448 * 2**-9)


def test_act_quant_is_act_then_quant():
    gateup = jnp.asarray(4 * random(0, 3, 256), BF16)
    args = (gateup, jnp.zeros(3, I32))
    product = act(*args, activation="silu", params=(None,), interpret=True)
    values, scales = act_quant(*args, activation="silu", params=(None,), interpret=True)
    want = quant_reference(product)
    np.testing.assert_allclose(np.asarray(scales)[:, :3], want[1], rtol=2**-8)
    np.testing.assert_allclose(f32(values), f32(want[0]), rtol=2**-3, atol=2**-9)


def test_act_lowers_for_cuda():
    for activation, params in ACTIVATIONS:
        for m, width in [(1, 128), (40, 384), (65536, 2048)]:
            shapes = ((m, 2 * width), BF16), ((m,), I32)
            kwargs = {"activation": activation, "params": params}
            assert custom_calls(functools.partial(act, **kwargs), *shapes) == 1
            assert custom_calls(functools.partial(act_quant, **kwargs, ue8m0=True), *shapes) == 1


def test_act_refuses():
    with pytest.raises(ValueError, match=r"'relu'.*silu"):
        act(jnp.zeros((8, 256), BF16), jnp.zeros(8, I32), activation="relu", params=())
    with pytest.raises(ValueError, match="m_indices"):
        act(jnp.zeros((8, 256), BF16), jnp.zeros(9, I32), activation="silu", params=(None,))


# --- permute_index


def index_reference(ids, num_experts, alignment, rows):
    src2dst = np.full(ids.shape, -1, np.int32)
    dst2src, m_indices = np.full(rows, -1, np.int32), np.full(rows, -1, np.int32)
    row = 0
    for expert in range(num_experts):
        for token, slot in np.argwhere(ids == expert):
            src2dst[token, slot], dst2src[row], m_indices[row] = row, token, expert
            row += 1
        row += -row % alignment
    assert row <= rows
    return src2dst, dst2src, m_indices


def assert_index(ids, num_experts, alignment, spare=0):
    most = ids.size + min(ids.size, num_experts) * (alignment - 1)
    rows = -(-most // alignment) * alignment + spare * alignment
    kwargs = {"num_experts": num_experts, "alignment": alignment, "rows": rows}
    got = permute_index(jnp.asarray(ids), **kwargs, interpret=True)
    for g, w in zip(got, index_reference(ids, **kwargs), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(
    ("t", "k", "num_experts", "alignment"), [(1, 1, 4, 8), (3, 3, 5, 32), (17, 2, 130, 8)]
)
def test_permute_index_in_one_block(t, k, num_experts, alignment):
    ids = np.random.default_rng(t).integers(-1, num_experts + 1, (t, k)).astype(np.int32)
    assert_index(ids, num_experts, alignment, spare=2)


@pytest.mark.parametrize("skewed", [False, True])
def test_permute_index_in_many_blocks(monkeypatch, skewed):
    for name, value in {"SINGLE": 16, "BLOCK": 16, "FAR_UNROLL": 1}.items():
        monkeypatch.setattr(permute, name, value)
    ids = np.random.default_rng(0).integers(-1, 5, (11, 3)).astype(np.int32)
    assert_index(np.full_like(ids, 4) if skewed else ids, 5, 24 if skewed else 8, spare=20)


def test_permute_index_lowers_for_cuda():
    cases = [(1, 1, 4, 8), (1, 8, 256, 128), (32, 8, 60, 64), (33, 8, 256, 32)]
    for t, k, experts, alignment in [*cases, (4001, 8, 128, 128), (16384, 8, 1024, 128)]:
        rows = -(-(t * k + experts * alignment) // alignment) * alignment
        fn = functools.partial(permute_index, num_experts=experts, alignment=alignment, rows=rows)
        assert custom_calls(fn, ((t, k), I32)) == (1 if t * k <= permute.SINGLE else 3)


def test_permute_index_refuses():
    with pytest.raises(ValueError, match="alignment=12"):
        permute_index(jnp.zeros((2, 2), I32), num_experts=4, alignment=12, rows=96)


# --- permute_rows


def mapping(t, k, num_experts=4, alignment=8):
    ids = np.random.default_rng(t).integers(-1, num_experts, (t, k)).astype(np.int32)
    rows = (t * k // alignment + num_experts + 1) * alignment
    src2dst, dst2src, _ = index_reference(ids, num_experts, alignment, rows)
    return jnp.asarray(src2dst), jnp.asarray(dst2src)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize(("t", "k", "width"), [(1, 1, 128), (3, 2, 384), (5, 3, 1024)])
def test_permute_rows(monkeypatch, t, k, width, dtype, apart):
    if apart:
        monkeypatch.setattr(permute, "MOST_SCALED", 0)
    src2dst, dst2src = mapping(t, k)
    live = np.asarray(dst2src) >= 0
    source = np.asarray(dst2src)[live]
    values = jnp.asarray(random(0, t, width), dtype)
    scales = random(1, width // 128, t + 3)
    scales[:, t:] = np.nan
    got, got_scales = permute_rows(values, jnp.asarray(scales), src2dst, dst2src, interpret=True)
    assert got.dtype == dtype
    np.testing.assert_array_equal(f32(got)[live], f32(values)[source])
    np.testing.assert_array_equal(np.asarray(got_scales)[:, live], scales[:, source])
    alone, nothing = permute_rows(values, None, src2dst, dst2src, interpret=True)
    assert nothing is None
    np.testing.assert_array_equal(f32(alone)[live], f32(values)[source])


def test_permute_rows_lowers_for_cuda():
    for t, k, width in [(1, 1, 128), (5, 16, 1152), (3, 2, 16384), (16384, 8, 7168)]:
        rows = t * k + 1024
        maps = ((t, k), I32), ((rows,), I32)
        for dtype in (BF16, FP8):
            values, scales = ((t, width), dtype), ((width // 128, t + 3), F32)
            assert custom_calls(permute_rows, values, scales, *maps) == 1
            assert custom_calls(permute_rows, values, None, *maps) == 1


def test_permute_rows_refuses():
    src2dst, dst2src = mapping(3, 2)
    with pytest.raises(ValueError, match="float32"):
        permute_rows(jnp.zeros((3, 128)), None, src2dst, dst2src)
    with pytest.raises(ValueError, match="Ts >= 3"):
        permute_rows(jnp.zeros((3, 128), BF16), jnp.zeros((1, 2)), src2dst, dst2src)


# --- unpermute


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("t", "k", "h"), [(1, 1, 128), (3, 4, 384), (2, 16, 1152)])
def test_unpermute(t, k, h, poison):
    m = t * k + 5
    rng = np.random.default_rng(0)
    src2dst = rng.permutation(m)[: t * k].reshape(t, k).astype(np.int32)
    absent = rng.random((t, k)) < 0.3
    weights, shared = rng.random((t, k)).astype(np.float32), random(1, t, h)
    weights[absent] = poison
    src2dst[absent] = -1
    rows = np.full((m, h), poison, np.float32)
    rows[src2dst[~absent]] = random(2, t * k, h)[: (~absent).sum()]
    rows, shared = jnp.asarray(rows, BF16), jnp.asarray(shared, BF16)
    picked = np.where(absent[..., None], 0, f32(rows)[src2dst])
    want = 2.5 * np.einsum("tk,tkh->th", np.where(absent, 0, weights), picked)
    for extra in (None, shared):
        got = unpermute(rows, src2dst, weights, extra, scaling_factor=2.5, interpret=True)
        total = want if extra is None else want + f32(shared)
        assert got.dtype == BF16
        np.testing.assert_allclose(f32(got), total, rtol=2**-8, atol=1e-5)


def test_unpermute_lowers_for_cuda():
    fn = functools.partial(unpermute, scaling_factor=1.0)
    for t, k, h in [(1, 1, 128), (5, 16, 3584), (16384, 8, 7168)]:
        for shared in (None, ((t, h), BF16)):
            shapes = ((t * k + 8, h), BF16), ((t, k), I32), ((t, k), F32), shared
            assert custom_calls(fn, *shapes) == 1


def test_unpermute_refuses():
    args = jnp.zeros((4, 100), BF16), jnp.zeros((2, 1), I32), jnp.zeros((2, 1)), None
    with pytest.raises(ValueError, match="100"):
        unpermute(*args, scaling_factor=1.0)


# --- route


def route_reference(logits, bias, scoring, top_k, num_groups, top_groups, renormalize):
    x = np.where(np.isnan(logits), -np.inf, np.minimum(logits, LARGEST)).astype(np.float64)
    with np.errstate(all="ignore"):
        if scoring == "softmax":
            top = x.max(-1, keepdims=True)
            e = np.exp(x - np.where(top == -np.inf, 0, top))
            scores = e / np.where(e.sum(-1, keepdims=True) > 0, e.sum(-1, keepdims=True), 1)
        elif scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-x))
        else:
            scores = np.sqrt(np.logaddexp(x, 0).astype(np.float32))
    scores = scores.astype(np.float32)
    ids, weights = [], []
    for row in scores:
        key = row if bias is None else row + bias
        groups = key.reshape(num_groups, -1)
        best = np.sort(groups, axis=1)[:, ::-1][:, : 1 if bias is None else 2].sum(1)
        winners = np.argsort(-best, kind="stable")[:top_groups]
        lost = ~np.isin(np.arange(key.size) // groups.shape[1], winners)
        order = np.lexsort((np.arange(key.size), -key, lost))[:top_k]
        ids.append(order)
        weights.append(row[order] / (row[order].sum() + 1e-20) if renormalize else row[order])
    return np.array(ids), np.array(weights)


HOSTILE = np.zeros((6, 12), np.float32)
HOSTILE[0], HOSTILE[1], HOSTILE[2] = np.nan, -np.inf, -120
HOSTILE[3, ::2], HOSTILE[4, 7], HOSTILE[5, 0] = -0.0, np.inf, np.nan


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(
    ("logits", "biased", "top_k", "num_groups", "top_groups"),
    [
        (3 * random(0, 1, 8), False, 2, 1, 1),
        (3 * random(1, 5, 60), True, 6, 4, 2),
        (3 * random(2, 6, 64), False, 8, 8, 3),
        (HOSTILE, True, 3, 4, 2),
        (HOSTILE, False, 4, 1, 1),
    ],
)
def test_route(scoring, logits, biased, top_k, num_groups, top_groups):
    # A bias that makes every key negative: a masked group must lose to negative keys too.
    bias = random(9, logits.shape[1]) - 6 if biased else None
    kwargs = {
        "scoring": scoring,
        "top_k": top_k,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "renormalize": biased,
    }
    ids, weights = route(
        jnp.asarray(logits), None if bias is None else jnp.asarray(bias), **kwargs, interpret=True
    )
    want_ids, want_weights = route_reference(logits, bias, **kwargs)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-5, atol=1e-30)
    assert all(len(set(row)) == top_k for row in np.asarray(ids).tolist())


def test_route_of_a_row_ignores_other_rows():
    logits = 3 * random(0, 5, 16)
    kwargs = {"top_k": 4, "num_groups": 2, "top_groups": 1, "renormalize": True, "interpret": True}
    fn = jax.jit(functools.partial(route, bias=None, scoring="softmax", **kwargs))
    first = fn(jnp.asarray(logits))
    logits[1:] = 1e3 * random(1, 4, 16)
    logits[3] = np.nan
    second = fn(jnp.asarray(logits))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[0], np.asarray(b)[0])


def test_route_lowers_for_cuda():
    cases = [
        (16384, 256, 8, 8, 4, "sigmoid", True),
        (1, 256, 8, 8, 4, "sigmoid", True),
        (1, 256, 8, 8, 4, "softmax", False),
        (3, 60, 4, 4, 2, "sqrtsoftplus", True),
        (5, 60, 4, 1, 1, "softmax", True),
        (5, 4, 2, 1, 1, "sqrtsoftplus", False),
        (7, 1, 1, 1, 1, "softmax", True),
        (9, 1024, 16, 1, 1, "softmax", False),
    ]
    for t, e, top_k, num_groups, top_groups, scoring, biased in cases:
        kwargs = {"top_k": top_k, "num_groups": num_groups, "top_groups": top_groups}
        fn = functools.partial(route, scoring=scoring, renormalize=True, **kwargs)
        assert custom_calls(fn, ((t, e), F32), ((e,), F32) if biased else None) == 1


def test_route_refuses():
    kwargs = {"num_groups": 1, "top_groups": 1, "renormalize": True}
    with pytest.raises(ValueError, match=r"top_k=5.*4"):
        route(jnp.zeros((2, 4)), None, scoring="sigmoid", top_k=5, **kwargs)
    with pytest.raises(ValueError, match=r"'tanh'.*softmax"):
        route(jnp.zeros((2, 4)), None, scoring="tanh", top_k=2, **kwargs)


# --- all of them


def test_no_tokens():
    none = jnp.zeros((0, 2), I32)
    assert quant(jnp.zeros((0, 256), BF16))[0].shape == (0, 256)
    assert (permute_index(none, num_experts=4, alignment=8, rows=16)[1] == -1).all()
    assert permute_rows(jnp.zeros((0, 128), BF16), None, none, jnp.zeros(8, I32))[0].shape[0] == 8
    rows = jnp.zeros((8, 128), BF16)
    assert unpermute(rows, none, jnp.zeros((0, 2)), None, scaling_factor=1.0).shape == (0, 128)


def test_missing_interpret_mode_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.pallas.mosaic_gpu.interpret.params", None)
    with pytest.raises(NotImplementedError, match=r"0\.10\.2 and 0\.11\.2"):
        quant(jnp.zeros((8, 128), BF16), interpret=True)
