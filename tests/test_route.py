"""`route` on logits that hurt, against the reference: exact first, then random."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BACKENDS, every_backend, same_bits
from hypothesis import given
from hypothesis import strategies as st

import dgmoe_jax as dg
from dgmoe_jax import reference
from dgmoe_jax.steps.route import router_logits

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
every_scoring = pytest.mark.parametrize("scoring", SCORINGS)
run = jax.jit(dg.route, static_argnames=("router", "backend"))

# Scores of distinct values differ by far more than an f32 ulp, sums of pairs as well.
GRID = [0.25 * n + 0.0625 for n in range(-24, 24)]
SPECIAL = [np.nan, np.inf, -np.inf, -40.0, 40.0]
BIASES = [-10.0, -3.5, -1.25, 0.0, 0.75]
# experts, k, groups, surviving groups
SHAPES = [(8, 2, 1, 1), (60, 4, 1, 1), (8, 3, 4, 2), (16, 8, 4, 2)]


def route(logits, router, bias=None, backend="xla"):
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    out = run(jnp.asarray(logits, jnp.float32), router, bias=bias, backend=backend)
    return np.asarray(out.topk_ids), np.asarray(out.topk_weights)


def agrees(logits, router, bias=None, backend="xla"):
    """ids equal to the reference's, weights within f32 rounding."""
    ids, weights = route(logits, router, bias, backend)
    want_ids, want_weights = reference.route(
        np.asarray(logits, np.float32),
        None if bias is None else np.asarray(bias, np.float32),
        scoring=router.scoring,
        top_k=router.top_k,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        renormalize=router.renormalize,
    )
    np.testing.assert_array_equal(ids, want_ids)
    # 2e-6: an f32 exponential of another library, a sum of k and a division, all within ulps.
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6, atol=1e-30)
    return ids, weights


def legal(ids, weights, experts):
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    assert ids.min() >= 0 and ids.max() < experts
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert np.isfinite(weights).all()


def some_router(shape, scoring, renormalize=True):
    _, top_k, num_groups, top_groups = shape
    return dg.RouterConfig(
        top_k=top_k,
        scoring=scoring,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
    )


@every_backend
@every_scoring
def test_ties_go_to_the_lowest_id(backend, scoring):
    logits = [[0.0] * 8, [1, 2, 2, 1, 2, 2, 0, 0], [-5, -5, 3, -5, 3, -5, -5, 3]]
    ids, weights = agrees(logits, dg.RouterConfig(top_k=4, scoring=scoring), backend=backend)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3], [1, 2, 4, 5], [2, 4, 7, 0]])
    np.testing.assert_allclose(weights[:2], 0.25, rtol=1e-6)


@every_backend
def test_equal_logits_tie_wherever_they_stand(backend):
    """60 experts: no multiple of a vector's width, where a remainder might be computed apart."""
    logits = np.repeat(np.asarray(GRID[::8], np.float32)[:, None], 60, axis=1)
    for scoring in SCORINGS if backend == "xla" else SCORINGS[:1]:
        ids, weights = route(logits, dg.RouterConfig(top_k=4, scoring=scoring), backend=backend)
        np.testing.assert_array_equal(ids, np.tile(np.arange(4), (len(logits), 1)))
        np.testing.assert_allclose(weights, 0.25, rtol=1e-6)


@every_backend
def test_losing_groups_never_win_with_negative_keys(backend):
    """Masking with zero would let a loser's 0 beat a winner's -9."""
    router = dg.RouterConfig(top_k=4, scoring="sigmoid", num_groups=4, top_groups=2)
    logits = np.tile(np.float32([0.1, 0.2, 2, 3, -1, 0.5, 4, 1]), (3, 1))
    ids, _ = agrees(logits, router, bias=np.full(8, -10.0), backend=backend)
    assert all(set(row) == {2, 3, 6, 7} for row in ids)


@every_backend
def test_losing_groups_never_win_when_survivors_have_no_finite_key(backend):
    router = dg.RouterConfig(top_k=4, scoring="sigmoid", num_groups=4, top_groups=2)
    bias = np.full(8, -np.inf)
    ids, weights = route([[0.0] * 8, [np.nan] * 8], router, bias=bias, backend=backend)
    np.testing.assert_array_equal(ids, np.tile(np.arange(4), (2, 1)))
    legal(ids, weights, 8)


@every_backend
def test_groups_rank_by_their_two_best_with_a_bias_and_by_the_best_without(backend):
    router = dg.RouterConfig(top_k=2, scoring="sigmoid", num_groups=2, top_groups=1)
    logits = [[3.0, -9.0, -9.0, -9.0, 2.0, 2.0, -9.0, -9.0]]
    assert set(agrees(logits, router, backend=backend)[0][0]) == {0, 1}
    assert set(agrees(logits, router, bias=np.zeros(8), backend=backend)[0][0]) == {4, 5}


@every_backend
def test_bias_chooses_and_does_not_weigh(backend):
    router = dg.RouterConfig(top_k=2, scoring="sigmoid", renormalize=False)
    bias = [0.0, 0.0, 5.0, 0.0]
    ids, weights = route([[2.0, 0.0, -1.0, 0.0]], router, bias=bias, backend=backend)
    np.testing.assert_array_equal(ids, [[2, 0]])
    np.testing.assert_allclose(weights, [[1 / (1 + np.e), 1 / (1 + np.exp(-2))]], rtol=1e-6)


@every_backend
@pytest.mark.parametrize(
    "scoring, experts, groups",
    [("softmax", 60, 1), ("sigmoid", 32, 4), ("sqrtsoftplus", 60, 1), ("softmax", 256, 8)],
)
def test_random_logits_agree_with_the_reference(backend, scoring, experts, groups):
    """Renormalised without groups or bias, and with both not."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((33, experts)) * 2
    router = some_router((experts, 6, groups, max(1, groups // 2)), scoring, groups == 1)
    bias = None if groups == 1 else rng.standard_normal(experts)
    agrees(logits, router, bias=bias, backend=backend)


@every_backend
@every_scoring
def test_a_row_does_not_depend_on_the_others(backend, scoring):
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((17, 32)).astype(np.float32) * 3
    logits[3] = np.nan
    router = some_router((32, 4, 4, 2), scoring)
    bias = rng.standard_normal(32) * 0.1
    together = route(logits, router, bias=bias, backend=backend)
    for t in (3, 16):
        for got, want in zip(
            route(logits[t : t + 1], router, bias=bias, backend=backend), together, strict=True
        ):
            same_bits(got[0], want[t])
    shuffled = route(logits[::-1], router, bias=bias, backend=backend)
    for got, want in zip(shuffled, together, strict=True):
        same_bits(got[::-1], want)


@st.composite
def cases(draw):
    shape, scoring = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(SCORINGS))
    # sqrt(softplus(-120)) underflows in f32, and in the reference it does not.
    lowest = -40.0 if scoring == "sqrtsoftplus" else -120.0
    values = st.sampled_from([*GRID, *SPECIAL, lowest])
    row = st.one_of(
        st.lists(values, min_size=shape[0], max_size=shape[0]),
        values.map(lambda v: [v] * shape[0]),
    )
    rows = draw(st.lists(row, min_size=3, max_size=3))
    bias = draw(st.lists(st.sampled_from(BIASES), min_size=shape[0], max_size=shape[0]))
    router = some_router(shape, scoring, draw(st.booleans()))
    return np.float32(rows), router, np.float32(bias) if draw(st.booleans()) else None


@given(cases())
def test_any_logits_give_legal_distinct_ids_as_the_reference_says(case):
    logits, router, bias = case
    ids, weights = agrees(logits, router, bias=bias)
    legal(ids, weights, logits.shape[1])
    if router.num_groups > 1:
        size = logits.shape[1] // router.num_groups
        assert all(len(set(row // size)) <= router.top_groups for row in ids)


@given(cases())
def test_any_row_alone_equals_the_row_in_company(case):
    logits, router, bias = case
    together = route(logits, router, bias=bias)
    for t, other in itertools.product(range(3), range(3)):
        moved = np.stack([logits[other], logits[t], np.full_like(logits[t], np.nan)])
        for got, want in zip(route(moved, router, bias=bias), together, strict=True):
            same_bits(got[1], want[t])


@given(st.data())
def test_any_floats_at_all_give_legal_distinct_ids(data):
    """Denormals, huge and -0.0, in logits and bias: beyond the grid the reference may differ by
    an ulp, so only what every row must hold."""
    shape = data.draw(st.sampled_from(SHAPES))
    floats = st.floats(width=32)
    logits = data.draw(st.lists(floats, min_size=2 * shape[0], max_size=2 * shape[0]))
    bias = data.draw(st.lists(floats, min_size=shape[0], max_size=shape[0]))
    router = some_router(shape, data.draw(st.sampled_from(SCORINGS)))
    ids, weights = route(np.reshape(logits, (2, -1)), router, bias=bias)
    legal(ids, weights, shape[0])


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_kernel_routes_the_special_rows_as_xla_does(backend):
    rng = np.random.default_rng(9)
    logits = rng.choice(np.float32(GRID + SPECIAL), (24, 16))
    logits[0], logits[1], logits[2], logits[3] = np.nan, -np.inf, -120.0, np.inf
    bias = rng.choice(np.float32(BIASES), 16)
    router = some_router((16, 8, 4, 2), "sigmoid")
    ids, weights = route(logits, router, bias=bias, backend=backend)
    want_ids, want_weights = route(logits, router, bias=bias)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6, atol=1e-30)


def test_logits_are_products_of_the_given_numbers_in_f32():
    """Weights that bf16 and TF32 cannot tell from 1, one at a time: the sums are exact."""
    x = jnp.asarray(np.eye(4, 128) * 3, jnp.bfloat16)
    gate_weight = 1 + np.arange(8 * 128).reshape(8, 128) * 2.0**-20
    got = jax.jit(router_logits)(x, jnp.asarray(gate_weight, jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, 3 * gate_weight.T[:4])


def test_no_tokens_give_no_rows():
    ids, weights = route(np.zeros((0, 8)), dg.RouterConfig(top_k=2))
    assert ids.shape == weights.shape == (0, 2)
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)


def test_valid_false_sends_a_token_nowhere():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32)
    router = dg.RouterConfig(top_k=2)
    free = dg.route(logits, router)
    got = dg.route(logits, router, valid=jnp.asarray([True, False, True]))
    np.testing.assert_array_equal(got.topk_ids[1], -1)
    np.testing.assert_array_equal(got.topk_weights[1], 0)
    for t in (0, 2):
        same_bits(got.topk_weights[t], free.topk_weights[t])
        same_bits(got.topk_ids[t], free.topk_ids[t])


@pytest.mark.parametrize(
    "kind, words, logits, bias, valid, router",
    [
        (ValueError, ["logits", "(8,)"], jnp.zeros(8), None, None, {}),
        (
            TypeError,
            ["logits", "bfloat16", "float32"],
            jnp.zeros((2, 8), jnp.bfloat16),
            None,
            None,
            {},
        ),
        (ValueError, ["top_k", "9", "8"], jnp.zeros((2, 8)), None, None, {"top_k": 9}),
        (
            ValueError,
            ["logits.shape[1]=8", "num_groups=3"],
            jnp.zeros((2, 8)),
            None,
            None,
            {"num_groups": 3},
        ),
        (ValueError, ["bias", "(7,)", "(8,)"], jnp.zeros((2, 8)), jnp.zeros(7), None, {}),
        (TypeError, ["bias", "int32", "float32"], jnp.zeros((2, 8)), jnp.zeros(8, int), None, {}),
        (ValueError, ["valid", "(3,)", "(2,)"], jnp.zeros((2, 8)), None, jnp.zeros(3, bool), {}),
        (TypeError, ["valid", "int32", "bool"], jnp.zeros((2, 8)), None, jnp.zeros(2, int), {}),
    ],
)
def test_errors_name_the_array_what_came_and_what_is_allowed(
    kind, words, logits, bias, valid, router
):
    with pytest.raises(kind) as caught:
        dg.route(logits, dg.RouterConfig(**{"top_k": 2, **router}), bias=bias, valid=valid)
    assert all(word in str(caught.value) for word in words), caught.value


def test_hash_selection_is_refused_with_what_runs():
    router = dg.RouterConfig(top_k=2, selection="hash")
    with pytest.raises(NotImplementedError, match=r"hash.*'scores' does"):
        dg.route(jnp.zeros((2, 8)), router)
