"""What the layer is lowered to for an NVIDIA GPU, seen from any machine, and what is refused."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU, every_layout, every_recipe, random_layer, tokens
from jax.sharding import AxisType, PartitionSpec

import dgmoe_jax as dg

GROUPED = dg.RouterConfig(top_k=4, scoring="sigmoid", num_groups=4, top_groups=2)
GEMM = {
    "fp8_block": "dgmoe_m_grouped_fp8_fp4_gemm_nt_",
    "bf16": "dgmoe_m_grouped_bf16_gemm_nt_",
}


def layer_of(backend, recipe, shared=0, layout="auto", arch=None):
    return random_layer(
        experts=8,
        shared=shared,
        bias=True,
        recipe=recipe,
        backend=backend,
        router=GROUPED,
        layout=layout,
        arch=arch,
    )


def lowered(layer, platform, count=64):
    x = jax.ShapeDtypeStruct((count, 128), jnp.bfloat16)
    traced = jax.jit(dg.moe_layer, static_argnames="cfg").trace(x, layer.params, cfg=layer.cfg)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text):
    """Targets in program order; the version in Mosaic's name belongs to the jax release."""
    targets = re.findall(r"stablehlo\.custom_call @([\w.]+)", text)
    assert len(targets) == text.count("stablehlo.custom_call")
    return [re.sub(r"^mosaic_gpu_v\d+$", "mosaic_gpu", target) for target in targets]


def is_one_program_without_the_host(text):
    return text.count("module @") == 1 and not re.search(
        r"stablehlo\.(send|recv|infeed|outfeed)\b", text
    )


@every_recipe
@every_layout
@pytest.mark.parametrize("shared", [0, 1])
def test_deep_gemm_is_one_program_of_mosaic_kernels_and_gemms(recipe, layout, shared):
    text = lowered(layer_of("deep_gemm", recipe, shared, layout), "cuda", count=16)
    kernel, gemm = "mosaic_gpu", GEMM[recipe]
    # route, permute_index, permute and quantise; w13, act, w2; unpermute
    want = [kernel] * 3 + [gemm + layout, kernel, gemm + layout] + [kernel]
    if shared:  # quantise, and the dense block
        want[-1:-1] = [kernel] * (recipe == "fp8_block")
        want[-1:-1] = [gemm + "contiguous", kernel, gemm + "contiguous"]
    assert custom_calls(text) == want
    assert is_one_program_without_the_host(text)


@every_layout
@pytest.mark.parametrize(
    "arch, recipe",
    [("sm90", "mxfp4"), ("sm100", "fp8_block"), ("sm100", "mxfp8"), ("sm100", "mxfp4")],
)
def test_every_recipe_is_the_same_program_on_what_its_architecture_reads(arch, recipe, layout):
    layer = layer_of("deep_gemm", recipe, 1, layout, arch)
    text = lowered(layer, "cuda", count=16)
    kernel, gemm = "mosaic_gpu", GEMM["fp8_block"]
    routed, shared = ([gemm + where, kernel, gemm + where] for where in (layout, "contiguous"))
    assert custom_calls(text) == [*[kernel] * 3, *routed, kernel, *shared, kernel]
    assert is_one_program_without_the_host(text)
    w13 = layer.params.experts.w13
    assert (w13.scales.dtype == jnp.int32) == (arch == "sm100")
    assert (w13.values.dtype == jnp.uint8) == ((arch, recipe) == ("sm100", "mxfp4"))


@every_recipe
@every_layout
def test_pallas_is_one_program_of_mosaic_kernels_alone(recipe, layout):
    text = lowered(layer_of("pallas", recipe, layout=layout), "cuda", count=16)
    # route, permute_index, permute; w13, act unless w13 does it, w2; unpermute
    fused = dg.plan(layer_of("pallas", recipe).cfg, 16, arch="sm90").fused
    assert custom_calls(text) == ["mosaic_gpu"] * (6 if fused else 7)
    assert fused == (recipe == "fp8_block")
    assert is_one_program_without_the_host(text)


@pytest.mark.parametrize("backend", ["pallas", "deep_gemm", "xla"])
def test_a_product_is_rounded_before_it_is_quantised_where_asked(backend):
    layer = layer_of(backend, "fp8_block")
    cfg = dataclasses.replace(layer.cfg, activation=dg.SiLU(keep_fp32=False))
    kept, rounded = (
        lowered(dataclasses.replace(layer, cfg=c), "cuda", count=16) for c in (layer.cfg, cfg)
    )
    assert custom_calls(kept) == custom_calls(rounded)
    assert kept != rounded


@pytest.mark.parametrize("count", [1, 17, 4001])
def test_pallas_lowers_with_shared_experts_at_odd_sizes(count):
    text = lowered(layer_of("pallas", "fp8_block", shared=1), "cuda", count=count)
    assert set(custom_calls(text)) == {"mosaic_gpu"}


# Whatever the router does: padding, shared slots, maps of copies, ids by token.
ROUTES = {
    "plain": (dg.RouterConfig.qwen3_moe(), 128, {}),
    "grouped": (dg.RouterConfig.deepseek_v3(), 256, dict(bias=(jnp.float32, 256))),
    "after": (dg.RouterConfig.gpt_oss(top_k=16), 1024, {}),
    "hash": (
        dg.RouterConfig.deepseek_v4(selection="hash"),
        256,
        dict(token_ids=(jnp.int32, "T"), hash_table=(jnp.int32, 999, 6), valid=(bool, "T")),
    ),
    "all": (
        dg.RouterConfig.deepseek_v3(top_k=16, fused_shared_experts=1),
        1000,
        dict(bias=(jnp.float32, 1000), valid=(bool, "T"), expert_map=(jnp.int32, 3, 1001)),
    ),
}


@pytest.mark.parametrize("count", [1, 4001])
@pytest.mark.parametrize("name", ROUTES)
def test_a_router_is_one_kernel_from_logits_to_ids_and_weights(name, count):
    router, experts, arrays = ROUTES[name]
    arrays = {
        name: jax.ShapeDtypeStruct([count if n == "T" else n for n in shape], dtype)
        for name, (dtype, *shape) in arrays.items()
    }
    logits = jax.ShapeDtypeStruct((count, experts), jnp.float32)
    run = jax.jit(dg.route, static_argnames=("router", "backend"))
    traced = run.trace(logits, router, backend="pallas", **arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert custom_calls(text) == ["mosaic_gpu"]
    # Nothing else computes.
    assert re.findall(r"= \"?(stablehlo\.\w+)", text) == ["stablehlo.custom_call"]
    assert is_one_program_without_the_host(text)


@every_recipe
def test_no_buffer_of_the_contiguous_layout_grows_with_experts_times_tokens(recipe):
    layer = layer_of("deep_gemm", recipe, layout="contiguous")
    text = lowered(layer, "cuda", count=4096)
    largest = max(
        math.prod(map(int, shape.split("x")))
        for shape in re.findall(r"tensor<((?:\d+x)*\d+)x\w+>", text)
    )
    rows = dg.plan(layer.cfg, 4096, arch="sm90").rows
    assert largest == rows * 256 and rows < 4096 * 4 + 8 * 128


@pytest.mark.parametrize("count", [4, 300])  # whose GEMMs and placing of rows are other kernels
def test_kernels_name_their_axes_as_no_callers_mesh_does(count):
    """One of an axis of the mesh would take its place from that."""
    layer = layer_of("pallas", "fp8_block", shared=1)
    x = jax.ShapeDtypeStruct((count, 128), jnp.bfloat16)
    traced = jax.jit(lambda x: dg.moe_layer(x, layer.params, layer.cfg)).trace(x)
    found = re.findall(r"axis_name=\(?'?([\w.]+)", str(traced.jaxpr))
    assert len(found) > 10 and all(name.startswith("dgmoe_jax.") for name in found), found


# What kernels called their own axes.
MESH_AXES = ("b", "m", "u", "t", "e", "r", "c", "cluster", "peer", "warpgroup")


@pytest.mark.skipif(not ON_GPU, reason="runs the compiled kernels")
@every_recipe
@pytest.mark.parametrize("count", [4, 300])
def test_a_layer_runs_whatever_the_callers_mesh_calls_its_axes(recipe, count):
    layer = layer_of("pallas", recipe, shared=1)
    x, spec = tokens(count, 128), PartitionSpec(MESH_AXES)
    mesh = jax.make_mesh((1,) * len(MESH_AXES), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES))
    run = lambda x: dg.moe_layer(x, layer.params, layer.cfg)  # noqa: E731
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    np.testing.assert_array_equal(np.asarray(run(x)), np.asarray(layer(x)))


@every_recipe
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_xla_calls_nothing_custom(recipe, platform):
    text = lowered(layer_of("xla", recipe), platform)
    assert custom_calls(text) == []
    assert is_one_program_without_the_host(text)


def test_the_count_would_see_a_callback():
    """The check above is not blind: a host callback is a custom call with a telling name."""

    def calls_home(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    # jax lowers callbacks for the platform at hand only.
    text = jax.jit(calls_home).lower(jnp.zeros(3)).as_text()
    assert any("callback" in target for target in custom_calls(text))


@every_recipe
def test_no_tokens_lower_to_no_kernel(recipe):
    assert custom_calls(lowered(layer_of("deep_gemm", recipe), "cuda", count=0)) == []


@pytest.mark.skipif(ON_GPU, reason="a GPU runs them")
@pytest.mark.parametrize("backend", ["deep_gemm", "pallas"])
@every_recipe
def test_gpu_backends_on_a_cpu_are_refused_with_what_runs_there(backend, recipe):
    layer = layer_of(backend, recipe)
    for run in (layer, lambda x: dg.moe_layer(x, layer.params, layer.cfg)):
        with pytest.raises(NotImplementedError, match=rf"'{backend}'.*GPU.*'xla'.*'emulator'"):
            run(jnp.zeros((3, 128), jnp.bfloat16))


@every_recipe
def test_the_emulator_is_not_lowered_for_a_gpu(recipe):
    with pytest.raises(NotImplementedError, match=r"'emulator'.*CPU"):
        lowered(layer_of("emulator", recipe), "cuda")
