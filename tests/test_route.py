"""`route` on logits that hurt, against the reference: exact first, then random."""

import dataclasses
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

SCORINGS = ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus")
every_scoring = pytest.mark.parametrize("scoring", SCORINGS)
run = jax.jit(dg.route, static_argnames=("router", "backend"))

# Scores of distinct values differ by far more than an f32 ulp, sums of pairs as well.
GRID = [0.25 * n + 0.0625 for n in range(-24, 24)]
SPECIAL = [np.nan, np.inf, -np.inf, -40.0, 40.0]
BIASES = [-10.0, -3.5, -1.25, 0.0, 0.75]
# experts, k, groups, surviving groups
SHAPES = [(8, 2, 1, 1), (60, 4, 1, 1), (8, 3, 4, 2), (16, 8, 4, 2)]


def route(logits, router, bias=None, backend="xla", **arrays):
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    out = run(jnp.asarray(logits, jnp.float32), router, bias=bias, backend=backend, **arrays)
    return np.asarray(out.topk_ids), np.asarray(out.topk_weights)


def agrees(logits, router, bias=None, backend="xla", **arrays):
    """ids equal to the reference's, weights within f32 rounding."""
    ids, weights = route(logits, router, bias, backend, **arrays)
    want_ids, want_weights = reference.route(
        np.asarray(logits, np.float32),
        None if bias is None else np.asarray(bias, np.float32),
        scoring=router.scoring,
        top_k=router.top_k,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        renormalize=router.renormalize,
        fused_shared_experts=router.fused_shared_experts,
        shared_weight=router.shared_weight or 1 / router.scaling_factor,
        **arrays,
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
@pytest.mark.parametrize("scoring, biased", [("sigmoid", True), ("softmax_topk", False)])
def test_kernel_routes_the_special_rows_as_xla_does(backend, scoring, biased):
    rng = np.random.default_rng(9)
    logits = rng.choice(np.float32(GRID + SPECIAL), (24, 16))
    logits[0], logits[1], logits[2], logits[3] = np.nan, -np.inf, -120.0, np.inf
    bias = rng.choice(np.float32(BIASES), 16) if biased else None
    router = some_router((16, 8, 4, 2), scoring)
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


@pytest.mark.parametrize(
    "kind, words, change",
    [
        (ValueError, ["token_ids: missing", "'hash'"], dict(token_ids=None)),
        (ValueError, ["hash_table: missing", "'hash'"], dict(hash_table=None)),
        (ValueError, ["token_ids", "(3,)", "(2,)"], dict(token_ids=jnp.zeros(3, int))),
        (TypeError, ["token_ids", "float32", "int32"], dict(token_ids=jnp.zeros(2))),
        (ValueError, ["hash_table", "(9, 3)", "(*, 2)"], dict(hash_table=jnp.zeros((9, 3), int))),
        (ValueError, ["hash_table", "one row"], dict(hash_table=jnp.zeros((0, 2), int))),
        (ValueError, ["expert_map", "(8,)", "(9,)"], dict(expert_map=jnp.zeros(8, int))),
        (ValueError, ["expert_map", "(2, 8)", "(*, 9)"], dict(expert_map=jnp.zeros((2, 8), int))),
        (ValueError, ["expert_map", "one copy"], dict(expert_map=jnp.zeros((0, 9), int))),
        (TypeError, ["expert_map", "list"], dict(expert_map=[0] * 9)),
        (TypeError, ["expert_map", "float32", "int32"], dict(expert_map=jnp.zeros((2, 9)))),
    ],
)
def test_lookups_that_do_not_fit_are_refused(kind, words, change):
    router = dg.RouterConfig(top_k=2, selection="hash", fused_shared_experts=1)
    arrays = dict(token_ids=jnp.zeros(2, int), hash_table=jnp.zeros((9, 2), int)) | change
    with pytest.raises(kind) as caught:
        dg.route(jnp.zeros((2, 8)), router, **arrays)
    assert all(word in str(caught.value) for word in words), caught.value


# --- by token id, and what becomes of the chosen

TABLE = np.int32([[0, 3], [7, 1], [2, 2], [5, -1], [8, 4]])


def hashed(**fields):
    return dg.RouterConfig(top_k=2, selection="hash", scaling_factor=2.5, **fields)


@every_backend
@every_scoring
def test_hash_takes_ids_by_token_in_the_tables_order_and_weights_from_the_scores(backend, scoring):
    """The last two rows name no expert in one slot; tokens -1 and 5 are outside the table."""
    logits = np.random.default_rng(2).standard_normal((7, 8))
    logits[1, 7] = np.nan
    for token_ids in (np.int32([0, 1, 2, 3, 4, -1, 5]), np.int32([1])):
        got = logits[: len(token_ids)]
        ids, _ = agrees(
            got, hashed(scoring=scoring), backend=backend, token_ids=token_ids, hash_table=TABLE
        )
        if len(ids) == 1:
            np.testing.assert_array_equal(ids, [[7, 1]])
        else:
            want = [[0, 3], [7, 1], [2, 2], [5, -1], [-1, 4], [-1, -1], [-1, -1]]
            np.testing.assert_array_equal(ids, want)


def test_hash_reads_neither_bias_nor_groups():
    logits, token_ids = np.random.default_rng(2).standard_normal((4, 8)), np.int32([0, 1, 2, 0])
    plain = route(logits, hashed(), token_ids=token_ids, hash_table=TABLE)
    grouped = hashed(num_groups=4, top_groups=1)
    got = route(logits, grouped, np.full(8, np.nan), token_ids=token_ids, hash_table=TABLE)
    for one, other in zip(got, plain, strict=True):
        same_bits(one, other)


@every_backend
def test_the_softmax_of_the_chosen_is_the_renormalised_softmax(backend):
    logits = np.random.default_rng(2).standard_normal((9, 60)) * 3
    after = agrees(logits, dg.RouterConfig(4, "softmax_topk", renormalize=False), backend=backend)
    before = route(logits, dg.RouterConfig(4, "softmax"), backend=backend)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_allclose(after[1], before[1], rtol=1e-6)


@every_backend
@pytest.mark.parametrize("shared_weight, want", [(None, 0.4), (1.0, 1.0)])
def test_fused_shared_experts_follow_the_routed_ones(backend, shared_weight, want):
    logits = np.random.default_rng(2).standard_normal((5, 8))
    router = dg.RouterConfig(2, scaling_factor=2.5)
    fused = dataclasses.replace(router, fused_shared_experts=2, shared_weight=shared_weight)
    ids, weights = agrees(logits, fused, backend=backend)
    np.testing.assert_array_equal(ids[:, 2:], [[8, 9]] * 5)
    np.testing.assert_array_equal(weights[:, 2:], np.float32(want))
    alone = route(logits, router, backend=backend)
    same_bits(ids[:, :2], alone[0])
    same_bits(weights[:, :2], alone[1])


# Logits of a row, its k + n, the copies of each expert: one row alone, and more than a block's.
@every_backend
@pytest.mark.parametrize("count, experts, copies", [(1, 8, 3), (9, 8, 1), (6, 20, 2)])
def test_a_map_gives_tokens_the_copies_in_turn_and_minus_1_where_remote(
    backend, count, experts, copies
):
    rng = np.random.default_rng(count)
    router = dg.RouterConfig(2, "sigmoid", fused_shared_experts=1)
    logits, valid = rng.standard_normal((count, experts)), np.arange(count) != 4
    expert_map = rng.integers(-2, 40, (copies, experts + 1)).astype(np.int32)
    ids, weights = agrees(logits, router, backend=backend, valid=valid, expert_map=expert_map)
    assert (ids >= -1).all() and (weights[ids < 0] == 0).all()
    if copies == 1:
        same_bits(route(logits, router, valid=valid, expert_map=expert_map[0])[0], ids)


def test_maps_of_all_ranks_serve_every_slot_once():
    rng = np.random.default_rng(0)
    logits, router = rng.standard_normal((33, 8)), dg.RouterConfig(4)
    copies = rng.permutation(16).reshape(2, 8).astype(np.int32)
    everywhere, weights = route(logits, router, expert_map=copies)
    served, total = np.zeros_like(everywhere), np.zeros_like(weights)
    for rank in range(4):
        here = np.where(copies // 4 == rank, copies, -1)
        ids, weights_here = route(logits, router, expert_map=here)
        served, total = served + (ids >= 0), total + weights_here
        np.testing.assert_array_equal(ids, np.where(everywhere // 4 == rank, everywhere, -1))
    assert (served == 1).all()
    same_bits(total, weights)


def test_expert_counts_leave_out_what_is_no_expert():
    ids = jnp.asarray([[0, 3], [3, -1], [3, 4], [-1, -(2**31)]], jnp.int32)
    counts = dg.expert_counts(dg.Routing(ids, jnp.ones(ids.shape)), 4)
    assert counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts, [1, 0, 0, 3])


@every_backend
@pytest.mark.parametrize("experts, top_k", [(1024, 16), (1000, 16), (769, 3)])
def test_up_to_1024_experts_and_16_slots(backend, experts, top_k):
    logits = np.random.default_rng(experts).standard_normal((5, experts))
    agrees(logits, dg.RouterConfig(top_k, "sigmoid"), bias=np.zeros(experts), backend=backend)


@st.composite
def permuted(draw):
    """Logits without ties, which would go to the lowest id of either order."""
    shape, scoring = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(SCORINGS))
    size = shape[0] // shape[2]
    values = [0.21 * n - 6 for n in range(shape[0])]
    logits = np.float32([draw(st.permutations(values)) for _ in range(2)])
    bias = np.float32(draw(st.permutations(values))) * 0.37 if draw(st.booleans()) else None
    # Experts change places within their group, and groups as a whole.
    groups = draw(st.permutations(range(shape[2])))
    moved = [g * size + e for g in groups for e in draw(st.permutations(range(size)))]
    return logits, bias, some_router(shape, scoring, draw(st.booleans())), np.array(moved)


@given(permuted())
def test_a_permutation_of_experts_permutes_the_ids(case):
    logits, bias, router, moved = case
    ids, weights = route(logits, router, bias=bias)
    got_ids, got_weights = route(
        logits[:, moved], router, bias=None if bias is None else bias[moved]
    )
    np.testing.assert_array_equal(moved[got_ids], ids)
    np.testing.assert_allclose(got_weights, weights, rtol=1e-6)


@given(st.data())
def test_losers_of_any_groups_never_win(data):
    """Negative scores (logits themselves), negative biases, infinities and NaN included."""
    shape = data.draw(st.sampled_from(SHAPES[2:]))
    values = st.sampled_from([*GRID, *SPECIAL, -3e38, 3e38])
    logits, bias = (
        np.float32(data.draw(st.lists(values, min_size=n, max_size=n)))
        for n in (2 * shape[0], shape[0])
    )
    router = some_router(shape, data.draw(st.sampled_from(SCORINGS)))
    ids, weights = route(logits.reshape(2, -1), router, bias=bias)
    legal(ids, weights, shape[0])
    size = shape[0] // router.num_groups
    assert all(len(set(row // size)) <= router.top_groups for row in ids)
