"""The layer on one device against the float64 oracle, exact first, at sizes that hurt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    BACKENDS,
    bits,
    error,
    every_backend,
    every_layout,
    every_recipe,
    exact_layer,
    exact_tokens,
    f64,
    gaussian,
    make_layer,
    moe_layer,
    random_ids,
    random_layer,
    rounded_oracle,
    routing,
    same_bits,
    tokens,
    within_0_3_percent_on_its_own_bytes,
)

import dgmoe_jax as dg


def router(**kw):
    return dg.RouterConfig(**kw)


GROUPED = router(top_k=8, scoring="sigmoid", num_groups=4, top_groups=2, scaling_factor=2.5)
PAIRED = router(top_k=2, scoring="sigmoid", num_groups=2, top_groups=1, scaling_factor=2.5)

# tokens and layer; each size of the issue at least once (0 tokens: test_reports).
SIZES = {
    "T1": (1, dict(experts=4, hidden=7168, inner=64, router=router(top_k=4))),
    "T3": (3, dict(experts=256, hidden=128, inner=64, bias=True, router=GROUPED)),
    "T17": (17, dict(experts=128, hidden=576, inner=64, router=router(top_k=6, renormalize=False))),
    "T127": (127, dict(experts=60, hidden=384, inner=192, shared=2, router=router(top_k=4))),
    "T129": (129, dict(experts=8, hidden=3584, bias=True, shared=1, router=PAIRED)),
    "T1024": (1024, dict(experts=4, hidden=576, router=router(top_k=2, scoring="sqrtsoftplus"))),
    # For interpreted kernels: groups, bias, padding and shared experts, all at once.
    "small": (17, dict(hidden=192, inner=64, bias=True, shared=1, router=PAIRED)),
}


def at(*names):
    """These sizes on the xla backend, and the small one on every other."""
    cases = [("xla", name) for name in names] + [(backend, "small") for backend in BACKENDS[1:]]
    return pytest.mark.parametrize("backend, name", cases)


# From an oracle that rounds where the layer rounds: what an ulp of f32 moves across a boundary.
ROUNDED = {"bf16": 0.003, "fp8_block": 0.01}


@every_backend
@every_recipe
def test_integers_and_powers_of_two_are_exact_to_the_last_bit(backend, recipe):
    layer = exact_layer(shared=1, recipe=recipe, backend=backend, scaling_factor=2.5)
    x, ids = exact_tokens(17), random_ids(1, 17, 2, 4)
    ids[3], ids[5, 1] = -1, -1
    weights = np.exp2(np.random.default_rng(2).integers(-2, 3, (17, 2)))
    want = rounded_oracle(layer, x, ids, weights)
    assert np.abs(want[[0, 16]]).min() > 0
    np.testing.assert_array_equal(f64(layer(x, ids, weights)), want)


@at("T1", "T3", "T17", "T127", "T129", "T1024")
def test_bf16_is_within_0_6_percent_of_the_oracle(backend, name):
    count, build = SIZES[name]
    layer = random_layer(recipe="bf16", backend=backend, **build)
    x = tokens(count, build["hidden"])
    assert error(layer(x), layer.oracle(x, *layer.reference_routing(x))) < 0.006


def fp8_case(backend, name):
    """A layer, its tokens and routing, its answer, and how far that is from no quantisation."""
    count, build = SIZES[name]
    layer = random_layer(recipe="fp8_block", backend=backend, **build)
    x = tokens(count, build["hidden"])
    ids, weights = layer.reference_routing(x)
    y = layer(x, ids, weights)
    return layer, x, ids, weights, y, error(y, layer.oracle(x, ids, weights, prepared=True))


@pytest.mark.parametrize("name", ["T1", "T17", "T129", "T1024"])
def test_fp8_is_4_2_to_4_8_percent_from_unquantised_activations(name):
    """The other sizes: below."""
    *_, from_unquantised = fp8_case("xla", name)
    # The error of one token is one draw; of many, their mean.
    low, high = (0.035, 0.055) if name == "T1" else (0.042, 0.048)
    assert low < from_unquantised < high


@at("T3", "T127")
def test_fp8_is_within_0_3_percent_on_its_own_bytes(backend, name):
    layer, x, ids, weights, y, from_unquantised = fp8_case(backend, name)
    within_0_3_percent_on_its_own_bytes(layer, x, ids, weights, y, backend)
    low, high = (0.042, 0.048) if name != "T3" else (0.035, 0.055)
    assert low < from_unquantised < high


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_layer_runs_without_jit(backend):
    layer, x = random_layer(recipe="fp8_block", backend=backend), tokens(3, 128)
    ids, ones = random_ids(0, 3, 2, 4), np.ones((3, 2))
    y = dg.moe_layer(jnp.asarray(x), layer.params, layer.cfg, routing=routing(ids))
    # Of so few values one that rounds the other way shows.
    assert error(y, rounded_oracle(layer, x, ids, ones)) < 2 * ROUNDED["fp8_block"]


@pytest.mark.parametrize(
    "activation, recipe",
    [
        (dg.SiLU(limit=0.5), "bf16"),
        (dg.OAISwiGLU(1.702, 0.75), "fp8_block"),
        (dg.SiTU(beta=1.5, linear_beta=0.5), "fp8_block"),
    ],
)
def test_every_activation_serves_routed_and_shared_experts(activation, recipe):
    layer = random_layer(activation=activation, shared=1, recipe=recipe, backend="xla")
    x, ids = tokens(17, 128), random_ids(0, 17, 2, 4)
    weights = np.random.default_rng(0).random((17, 2))
    assert error(layer(x, ids, weights), rounded_oracle(layer, x, ids, weights)) < ROUNDED[recipe]


@every_backend
@every_recipe
def test_the_layouts_agree_to_the_last_bit(backend, recipe):
    """Also where ids repeat within a token, for which slabs have room unless a plan has not."""
    contiguous, masked = (
        random_layer(recipe=recipe, backend=backend, layout=layout, shared=1)
        for layout in ("contiguous", "masked")
    )
    x, ids = tokens(17, 128), random_ids(3, 17, 2, 4)
    ids[4], ids[9] = 2, (-1, 3)
    same_bits(masked(x, ids), contiguous(x, ids))
    if backend != "emulator":
        same_bits(masked(x), contiguous(x))


@every_layout
def test_a_plan_of_larger_tiles_changes_no_bit(layout):
    """A tile's padding may spill over other experts' rows and past the last one."""
    layer = random_layer(backend="xla", layout=layout)
    x, ids = tokens(30, 128), random_ids(3, 30, 2, 4)
    ids[:7], ids[7:] = (0, 1), (3, 2)
    want = layer(x, ids)
    own = dg.plan(layer.cfg, 30, distinct_ids=False)
    for tile in (2 * own.tile, 4 * own.tile):
        same_bits(layer(x, ids, plan=dataclasses.replace(own, tile=tile)), want)


def test_a_token_that_breaks_the_promise_of_distinct_ids_is_nan_and_alone():
    """Without the promise there is room for 40 rows of one expert, with it for 32."""
    layer = random_layer(backend="xla", layout="masked")
    x, ids = tokens(30, 128), random_ids(3, 30, 2, 4)
    ids[:20] = 1
    ids[20:] = (2, -1)
    want = layer(x, ids)
    assert not np.isnan(f64(want)).any()
    promised = dg.plan(layer.cfg, 30, distinct_ids=True)
    assert promised.capacity == 32 < dg.plan(layer.cfg, 30, distinct_ids=False).capacity
    with pytest.raises(ValueError, match=r"plan.capacity=32: .* at least 60 .*distinct_ids=True"):
        layer(x, ids, plan=dg.plan(layer.cfg, 30))
    got = layer(x, ids, plan=promised)
    assert np.isnan(f64(got[:20])).all()
    same_bits(got[20:], want[20:])


def test_a_routing_of_ones_own_keeps_the_gate_of_fused_shared_experts():
    router = dg.RouterConfig(top_k=2, fused_shared_experts=1)
    layer = random_layer(shared=1, router=router, backend="xla")
    gate = gaussian(np.random.default_rng(1), 1, 128, scale=0.3)
    params = dg.prepare_params(layer.raw | {"shared_gate_weight": gate}, layer.cfg)
    x = jnp.asarray(tokens(17, 128))
    logits = jnp.dot(x, params.gate_weight.T, preferred_element_type=jnp.float32)
    chosen = dg.route(logits, router)
    own = moe_layer(x, params, cfg=layer.cfg)
    same_bits(moe_layer(x, params, cfg=layer.cfg, routing=chosen), own)
    assert error(own, f64(moe_layer(x, layer.params, cfg=layer.cfg))) > 0.1  # without a gate


# --- who may touch whom


@every_backend
@every_recipe
def test_a_token_does_not_depend_on_its_neighbours(backend, recipe):
    layer = random_layer(recipe=recipe, backend=backend)
    x, ids = np.array(tokens(17, 128)), random_ids(3, 17, 2, 4)
    want = layer(x, ids)
    for seed in range(3 if backend == "xla" else 1):
        kept = np.random.default_rng(seed).random(17) < 0.3
        kept[seed * 8] = True
        other, other_ids = np.array(tokens(17, 128, seed=seed)), random_ids(seed, 17, 2, 4)
        other[kept], other_ids[kept] = x[kept], ids[kept]
        same_bits(layer(other, other_ids)[kept], want[kept])
    if backend != "emulator":
        own = layer(x)
        other = np.array(tokens(17, 128, seed=9))
        other[5] = x[5]
        same_bits(layer(other)[5], own[5])


@every_recipe
def test_a_token_alone_equals_the_token_in_a_batch(recipe):
    layer = random_layer(hidden=576, inner=192, recipe=recipe, backend="xla")
    x, ids = tokens(129, 576), random_ids(3, 129, 2, 4)
    same_bits(layer(x[:1], ids[:1]), layer(x, ids)[:1])


@every_backend
@every_recipe
def test_nan_or_inf_in_a_token_makes_that_token_nan_and_no_other(backend, recipe):
    layer = random_layer(recipe=recipe, backend=backend)
    clean, dirty = tokens(17, 128), np.array(tokens(17, 128))
    dirty[4, 77], dirty[9, 0], dirty[16, 127] = np.nan, np.inf, -np.inf
    bad = np.isin(np.arange(17), (4, 9, 16))
    own_router = (None,) if backend != "emulator" else ()  # slow there, and in test_route
    for ids in (*own_router, random_ids(3, 17, 2, 4)):
        want, got = layer(clean, ids), layer(dirty, ids)
        assert np.isnan(f64(got[bad])).all()
        same_bits(got[~bad], want[~bad])


@every_backend
@every_recipe
def test_inputs_are_not_modified(backend, recipe):
    layer = random_layer(recipe=recipe, backend=backend)
    given = (jnp.asarray(tokens(17, 128)), layer.params, routing(random_ids(3, 17, 2, 4)))
    before = [np.array(leaf) for leaf in jax.tree.leaves(given)]
    jax.block_until_ready(moe_layer(*given[:2], cfg=layer.cfg, routing=given[2]))
    for leaf, want in zip(jax.tree.leaves(given), before, strict=True):
        same_bits(leaf, want)


def test_tokens_that_are_not_valid_give_zeros_and_change_nobody():
    """Shared experts see them too, and must not answer."""
    layer = random_layer(shared=1, recipe="fp8_block", backend="xla")
    x = np.array(tokens(17, 128))
    want = layer(x, valid=jnp.ones(17, bool))
    valid = np.arange(17) % 3 != 1
    x[1], x[4] = np.nan, np.inf
    got = layer(x, valid=jnp.asarray(valid))
    same_bits(got[valid], want[valid])
    np.testing.assert_array_equal(bits(got[~valid]), 0)


# --- routing that the caller brings


@pytest.mark.parametrize("top_k, recipe", [(1, "bf16"), (5, "fp8_block")])
def test_routing_may_have_another_k_duplicates_and_absent_experts(top_k, recipe):
    layer = random_layer(recipe=recipe, backend="xla")
    rng = np.random.default_rng(4)
    x, ids = tokens(17, 128), rng.integers(-1, 4, (17, top_k))
    ids[0], ids[1] = 3, -1
    weights = rng.random((17, top_k)).astype(np.float32)
    got = layer(x, ids, weights)
    assert error(got, rounded_oracle(layer, x, ids, weights)) < ROUNDED[recipe]
    np.testing.assert_array_equal(f64(got[1]), 0.0)


@every_backend
def test_ids_out_of_range_contribute_nothing(backend):
    """As -1 does: under jit they cannot raise, and they must not read another expert's row."""
    layer = random_layer(backend=backend)
    x, ids = tokens(17, 128), random_ids(3, 17, 2, 4)
    absent = np.array(ids)
    absent[2, 0], absent[5], absent[9, 1] = -1, -1, -1
    wild = np.array(ids)
    wild[2, 0], wild[5], wild[9, 1] = 4, (-7, 2**31 - 1), -(2**31)
    same_bits(layer(x, wild), layer(x, absent))


@every_backend
@every_layout
@every_recipe
def test_all_tokens_on_one_expert_and_an_expert_with_none(backend, layout, recipe):
    layer = random_layer(recipe=recipe, backend=backend, layout=layout)
    x, ones = tokens(17, 128), np.ones((17, 2))
    crowded = np.full((17, 2), (2, -1))
    without_3 = np.where((ids := random_ids(0, 17, 2, 4)) == 3, 1, ids)
    for ids in (crowded, without_3):
        assert error(layer(x, ids), rounded_oracle(layer, x, ids, ones)) < ROUNDED[recipe]


# --- routers that look ids up, and shared experts among the others


def hash_layer(backend="xla", layout="auto", **cfg):
    raw = random_layer().raw | {"hash_table": np.array([[0, 3], [1, 1], [2, 0], [3, 1]])}
    by_token = router(top_k=2, scoring="sqrtsoftplus", selection="hash", scaling_factor=1.5)
    return make_layer(raw, inner=128, router=by_token, backend=backend, layout=layout, **cfg)


LAYOUTS = [("xla", "masked"), *((backend, "contiguous") for backend in BACKENDS)]
every_backend_and_xla_masked = pytest.mark.parametrize("backend, layout", LAYOUTS)


@every_backend_and_xla_masked
def test_hash_selection_sends_tokens_where_the_table_says(backend, layout):
    """An expert named twice counts twice; a token outside the table goes nowhere."""
    layer = hash_layer(backend, layout)
    x, token_ids = tokens(17, 128), np.arange(17) % 4
    token_ids[5], token_ids[9] = -1, 4
    ids = layer.raw["hash_table"][token_ids % 4].astype(np.int32)
    ids[[5, 9]] = -1
    scores = np.sqrt(np.logaddexp(0, f64(x) @ f64(layer.raw["gate_weight"]).T))
    weights = np.take_along_axis(scores, np.maximum(ids, 0), axis=1)
    weights /= weights.sum(axis=1, keepdims=True)
    got = layer(x, token_ids=jnp.asarray(token_ids, jnp.int32))
    assert error(got, layer.oracle(x, ids, weights)) < 0.006
    np.testing.assert_array_equal(f64(got[[5, 9]]), 0.0)


def test_hash_selection_needs_token_ids_unless_the_caller_routes():
    layer, x = hash_layer(), tokens(3, 128)
    with pytest.raises(ValueError, match="token_ids: missing"):
        layer(x)
    with pytest.raises(ValueError, match=r"token_ids: shape \(2,\), must be \(3,\)"):
        layer(x, token_ids=jnp.zeros(2, jnp.int32))
    other = dataclasses.replace(layer, params=random_layer().params)
    with pytest.raises(ValueError, match="hash_table: missing"):
        other(x, token_ids=jnp.zeros(3, jnp.int32))
    assert layer(x, random_ids(0, 3, 2, 4)).shape == (3, 128)


@every_backend_and_xla_masked
def test_shared_experts_fused_or_apart_give_the_same_sum(backend, layout):
    """Scaled by 2.5 in slots of weight 1 / 2.5, or added as they are."""
    both = [
        random_layer(
            shared=2, router=router(top_k=2, scaling_factor=2.5, fused_shared_experts=fused)
        )
        for fused in (0, 2)
    ]
    x, valid = tokens(17, 128), np.arange(17) != 3
    apart, fused = (
        dataclasses.replace(
            layer, cfg=dataclasses.replace(layer.cfg, backend=backend, layout=layout)
        )(x, valid=jnp.asarray(valid))
        for layer in both
    )
    assert error(fused, apart) < ROUNDED["bf16"]
    np.testing.assert_array_equal(f64(fused[3]), 0.0)


# --- calls that are refused


@pytest.mark.parametrize(
    "kind, words, change",
    [
        (ValueError, ["x", "(3, 64)", "(*, 128)"], dict(x=jnp.zeros((3, 64), jnp.bfloat16))),
        (ValueError, ["x", "(128,)", "(*, 128)"], dict(x=jnp.zeros(128, jnp.bfloat16))),
        (TypeError, ["x", "float32", "bfloat16"], dict(x=jnp.zeros((3, 128)))),
        (ValueError, ["valid", "(2,)", "(3,)"], dict(valid=jnp.ones(2, bool))),
        (TypeError, ["valid", "int32", "bool"], dict(valid=jnp.ones(3, jnp.int32))),
        (ValueError, ["topk_ids", "(2, 2)", "(3, *)"], dict(routing=routing(np.zeros((2, 2))))),
        (
            ValueError,
            ["topk_weights", "(3, 1)", "(3, 2)"],
            dict(routing=routing(np.zeros((3, 2)), np.zeros((3, 1)))),
        ),
        (ValueError, ["topk_ids", "(3, 0)", "one slot"], dict(routing=routing(np.zeros((3, 0))))),
        (
            TypeError,
            ["topk_ids", "uint8", "int32"],
            dict(routing=dg.Routing(jnp.zeros((3, 2), jnp.uint8), jnp.zeros((3, 2)))),
        ),
        (
            TypeError,
            ["topk_weights", "bfloat16", "float32"],
            dict(routing=dg.Routing(jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2), jnp.bfloat16))),
        ),
    ],
)
def test_errors_name_the_array_what_came_and_what_is_allowed(kind, words, change):
    layer = random_layer(backend="xla")
    given = dict(x=jnp.zeros((3, 128), jnp.bfloat16))
    given.update(change)
    with pytest.raises(kind) as caught:
        dg.moe_layer(given.pop("x"), layer.params, layer.cfg, **given)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "words, other",
    [
        (["params.experts.w13", "'bf16'", "'fp8_128x128'"], dict(recipe="fp8_block")),
        (["params.gate_weight", "(4, 128)", "(4, 192)"], dict(hidden_size=192)),
        (["params.gate_weight", "(4, 128)", "(8, 128)"], dict(num_experts=8)),
        (["params.experts.w13", "(4, 256, 128)", "(4, 512, 128)"], dict(intermediate_size=129)),
        (["params.shared", "missing", "num_shared_experts=1"], dict(num_shared_experts=1)),
    ],
)
def test_params_of_another_config_are_refused(words, other):
    layer = random_layer(backend="xla")
    cfg = dataclasses.replace(layer.cfg, **other)
    with pytest.raises(ValueError) as caught:
        dg.moe_layer(jnp.zeros((3, cfg.hidden_size), jnp.bfloat16), layer.params, cfg)
    assert all(word in str(caught.value) for word in words), caught.value


@every_layout
def test_a_plan_for_fewer_tokens_is_refused(layout):
    layer = random_layer(backend="xla", layout=layout)
    small = dg.plan(layer.cfg, 3)
    what = "rows" if layout == "contiguous" else "capacity"
    least = getattr(small, what)
    with pytest.raises(ValueError, match=rf"plan.{what}={least}: must be at least \d+"):
        layer(tokens(129, 128), plan=small)


def test_a_plan_for_fewer_experts_is_refused():
    plan = dg.plan(dataclasses.replace(random_layer(layout="masked").cfg, num_experts=2), 3)
    with pytest.raises(ValueError, match=r"plan.rows=16: .*capacity=8 for each of 4"):
        random_layer(layout="masked")(tokens(3, 128), plan=plan)
