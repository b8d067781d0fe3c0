"""What the layer is lowered to for an NVIDIA GPU, seen from any machine, and what is refused."""

import re

import jax
import jax.numpy as jnp
import pytest
from conftest import ON_GPU, every_recipe, random_layer

import dgmoe_jax as dg

GROUPED = dg.RouterConfig(top_k=4, scoring="sigmoid", num_groups=4, top_groups=2)
GEMM = {
    "fp8_block": "dgmoe_m_grouped_fp8_fp4_gemm_nt_contiguous",
    "bf16": "dgmoe_m_grouped_bf16_gemm_nt_contiguous",
}


def layer_of(backend, recipe, shared=0):
    return random_layer(
        experts=8, shared=shared, bias=True, recipe=recipe, backend=backend, router=GROUPED
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
@pytest.mark.parametrize("shared", [0, 1])
def test_deep_gemm_is_one_program_of_mosaic_kernels_and_gemms(recipe, shared):
    text = lowered(layer_of("deep_gemm", recipe, shared), "cuda")
    gemm, kernel = GEMM[recipe], "mosaic_gpu"
    # route, quant (fp8), permute_index, permute_rows; w13, act, w2; shared experts'; unpermute
    before = 4 if recipe == "fp8_block" else 3
    experts = [gemm, kernel, gemm]
    assert custom_calls(text) == [kernel] * before + experts * (1 + shared) + [kernel]
    assert is_one_program_without_the_host(text)


@every_recipe
def test_pallas_is_one_program_of_mosaic_kernels_alone(recipe):
    text = lowered(layer_of("pallas", recipe), "cuda")
    assert custom_calls(text) == ["mosaic_gpu"] * (8 if recipe == "fp8_block" else 7)
    assert is_one_program_without_the_host(text)


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
