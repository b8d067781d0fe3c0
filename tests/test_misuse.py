"""Caller mistakes that a reader of the API found, and transformations around the layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dgmoe_jax as dg

CFG = dg.MoEConfig(4, 128, 64, dg.RouterConfig(top_k=2), recipe="fp8_block")
KEYS = jax.random.split(jax.random.key(0), 4)
RAW = {
    "gate_weight": jax.random.normal(KEYS[0], (4, 128), jnp.bfloat16),
    "w13": jax.random.normal(KEYS[1], (4, 128, 128), jnp.bfloat16),
    "w2": jax.random.normal(KEYS[2], (4, 128, 64), jnp.bfloat16),
}
X = jax.random.normal(KEYS[3], (5, 128), jnp.bfloat16)
PARAMS = dg.prepare_params(RAW, CFG)
W13 = PARAMS.experts.w13


def with_w13(**changes):
    w13 = dataclasses.replace(W13, **changes)
    return dataclasses.replace(PARAMS, experts=dg.ExpertWeights(w13, PARAMS.experts.w2))


def layer(x=X, params=PARAMS, cfg=CFG, **more):
    return dg.moe_layer(x, params, cfg, **more)


MISTAKES = {
    "params are the raw mapping": (lambda: layer(params=RAW), TypeError, "params: dict"),
    "x is a list": (lambda: layer(x=[1.0]), TypeError, "x: list"),
    "cfg is missing": (lambda: layer(cfg=None), TypeError, "cfg: NoneType"),
    "routing is a tuple": (lambda: layer(routing=(1, 2)), TypeError, "routing: tuple"),
    "plan is a mapping": (lambda: layer(plan={"rows": 8}), TypeError, "plan: dict"),
    "scales of two experts": (
        lambda: layer(params=with_w13(scales=W13.scales[:2])),
        ValueError,
        r"w13.scales: shape \(2, 2, 1\), must be \(4, 2, 1\)",
    ),
    "scales are missing": (lambda: layer(params=with_w13(scales=None)), TypeError, "w13.scales"),
    "values are f32": (
        lambda: layer(params=with_w13(values=W13.values.astype(jnp.float32))),
        TypeError,
        "w13: dtype float32",
    ),
    "bias broadcasts": (
        lambda: layer(params=dataclasses.replace(PARAMS, gate_bias=jnp.zeros(1))),
        ValueError,
        r"gate_bias: shape \(1,\), must be \(4,\)",
    ),
    "tokens are a float": (lambda: dg.plan(CFG, 2.5), TypeError, "num_tokens=2.5"),
    "tokens overflow numpy": (
        lambda: dg.plan(CFG, np.int32(2**30)),
        ValueError,
        "num_tokens=1073741824",
    ),
    "top_k is negative": (lambda: dg.plan(CFG, 5, top_k=-3), ValueError, "top_k=-3"),
    "arch is unknown": (lambda: dg.plan(CFG, 5, arch="hopper"), ValueError, "arch='hopper'"),
    "alignment is 0": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), alignment=0),
        ValueError,
        "alignment=0",
    ),
    "tile is no multiple": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), alignment=16, tile=24),
        ValueError,
        "tile=24.*alignment=16",
    ),
    "fused without our GEMM": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), fused=True),
        ValueError,
        "fused=True: not with backend='xla'",
    ),
    "rows are a string": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), rows="a"),
        TypeError,
        "Plan.rows='a': must be an int",
    ),
    "capacity is negative": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), capacity=-8),
        ValueError,
        "Plan.capacity=-8: must be at least 0",
    ),
    "plan's backend is unknown": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), backend="nope"),
        ValueError,
        "Plan.backend='nope'",
    ),
    "fused is a string": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), fused="yes"),
        TypeError,
        "Plan.fused='yes': must be a bool",
    ),
    "layout is unknown": (
        lambda: dataclasses.replace(dg.plan(CFG, 5), layout="compact"),
        ValueError,
        "layout='compact'",
    ),
    "beta is no f32": (lambda: dg.SiTU(1e-50, 1.0), ValueError, "SiTU.beta=1e-50"),
    "factor is no f32": (
        lambda: dg.RouterConfig(2, scaling_factor=10**400),
        ValueError,
        "scaling_factor",
    ),
    "recipe is a list": (
        lambda: dataclasses.replace(CFG, recipe=[]),
        TypeError,
        "recipe=.*must be a string",
    ),
    "route's backend is unknown": (
        lambda: dg.route(jnp.zeros((2, 4)), CFG.router, backend="cuda"),
        ValueError,
        "backend='cuda'",
    ),
    "scales with bf16 weights": (
        lambda: dg.prepare_params(RAW | {"w13_scale": jnp.ones((4, 2, 1))}, CFG),
        ValueError,
        "w13_scale: given with w13 of dtype bfloat16; goes with float8_e4m3fn",
    ),
    "a checkpoint's own name": (
        lambda: dg.prepare_params(RAW | {"w13_scale_inv": jnp.ones((4, 2, 1))}, CFG),
        ValueError,
        "_scale_inv is .*_scale here",
    ),
    "derivative by the tokens": (
        lambda: jax.grad(lambda x: layer(x).astype(jnp.float32).sum())(X),
        NotImplementedError,
        "no derivative",
    ),
    "derivative by the router": (
        lambda: jax.grad(
            lambda w: layer(params=dataclasses.replace(PARAMS, gate_weight=w))[0, 0].astype(float)
        )(PARAMS.gate_weight),
        NotImplementedError,
        "no derivative",
    ),
    "symbolic tokens": (
        lambda: jax.export.export(jax.jit(layer))(
            jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, 128"), jnp.bfloat16)
        ),
        TypeError,
        "num_tokens=t: must be an int, known when tracing",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    call, error, text = MISTAKES[mistake]
    with pytest.raises(error, match=text):
        call()


def test_numpy_numbers_make_a_config():
    router = dg.RouterConfig(np.int64(2), scaling_factor=np.float32(2.5))
    assert dg.MoEConfig(np.int32(4), 128, 64, router) == dg.MoEConfig(
        4, 128, 64, dg.RouterConfig(2, scaling_factor=2.5)
    )


def test_a_format_can_be_asked_for_powers_of_two():
    scales = dg.quantize(3 * jnp.ones((1, 128)), W13.format, ue8m0=True).scales
    assert float(scales[0, 0]) == 2.0**-7


def test_a_format_of_the_callers_own_is_used_as_it_is():
    halves = dataclasses.replace(W13.format, name="mine", group=(1, 64), peak=224.0)
    scaled = dg.quantize(jnp.ones((1, 128)), halves)
    assert scaled.format == halves
    assert scaled.scales.shape == (1, 2)
    assert float(scaled.values[0, 0]) == 224.0


def test_the_same_bits_inside_jit_scan_and_shard_map():
    want = np.asarray(jax.jit(layer)(X))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        lambda x, p: layer(x, p), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")
    )
    scanned = jax.lax.scan(lambda c, x: (c, layer(x)), 0, jnp.stack([X, X]))[1]
    assert np.array_equal(np.asarray(jax.jit(sharded)(X, PARAMS)), want)
    assert np.array_equal(np.asarray(scanned[1]), want)
    assert jax.vmap(layer)(jnp.stack([X, X])).shape == (2, 5, 128)
