"""The layer against transformers' own modules: same weights, same tokens, eager, on the CPU.

The modules compute in f32 on weights and tokens that are bf16 numbers. Our bf16 recipe rounds to
bf16 at five places: gate and up, their product, each expert's row, the sum. Each is off by at most
u = 2**-9 of its value, with random signs, and silu passes on its gate's error at most 1.1 times: so
sqrt(1.1**2 + 4) u = 2.3 u = 0.45 % in the Frobenius norm if every one took its maximum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import error, f64, gaussian, make_layer, tokens
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import dgmoe_jax as dg

WITHIN_BF16 = 0.0045
COUNT, HIDDEN, INNER = 129, 192, 64


def torch_f32(array):
    return torch.from_numpy(np.asarray(array).astype(np.float32))


def fill(module, seed):
    """Gives every parameter a Gaussian of bf16 numbers; returns them by name."""
    rng = np.random.default_rng(seed)
    filled = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        filled[name] = gaussian(rng, *shape, scale=shape[-1] ** -0.5)
        parameter.data = torch_f32(filled[name])
    return filled


def gate_then_up(weights, prefix):
    return np.concatenate(
        [weights[f"{prefix}.gate_proj.weight"], weights[f"{prefix}.up_proj.weight"]]
    )


@torch.no_grad()
def compare(module, layer, x, scaling_factor=1.0):
    """Same experts for every token, weights to f32 rounding, outputs to bf16 rounding."""
    _, want_weights, want_ids = module.gate(torch_f32(x))
    # transformers leaves the order of the chosen open and has its scaling factor in the weights.
    order = want_ids.argsort(dim=-1)
    want_ids = want_ids.gather(1, order).numpy()
    want_weights = want_weights.gather(1, order).numpy() / scaling_factor
    got = jax.jit(dg.route, static_argnames="router")(
        jnp.asarray(f64(x) @ f64(layer.raw["gate_weight"]).T, jnp.float32),
        layer.cfg.router,
        bias=layer.params.gate_bias,
    )
    order = np.argsort(got.topk_ids, axis=-1)
    ids = np.take_along_axis(np.asarray(got.topk_ids), order, axis=-1)
    weights = np.take_along_axis(np.asarray(got.topk_weights), order, axis=-1)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)
    want = module(torch_f32(x)[None])[0].numpy()
    y = layer(x)
    assert error(y, want) < WITHIN_BF16
    # And no single element hides in the norm: each token's worst is within its own scale.
    worst = np.abs(f64(y) - want).max(axis=1)
    assert (worst < 8 * WITHIN_BF16 * np.sqrt((want**2).mean(axis=1))).all()


@pytest.mark.parametrize("num_groups, top_groups, renormalize", [(4, 2, True), (1, 1, False)])
def test_deepseek_v3_moe(num_groups, top_groups, renormalize):
    """Sigmoid, correction bias, groups, scaling factor and two shared experts."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=top_groups,
        n_shared_experts=2,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
        experts_implementation="eager",
    )
    module = DeepseekV3MoE(config).eval()
    weights = fill(module, seed=num_groups)
    # As large as the spread of the scores: it decides many choices, some against the score.
    bias = np.random.default_rng(0).standard_normal(16, np.float32) * np.float32(0.2)
    module.gate.e_score_correction_bias.copy_(torch_f32(bias))
    layer = make_layer(
        {
            "gate_weight": weights["gate.weight"],
            "gate_bias": bias,
            "w13": weights["experts.gate_up_proj"],
            "w2": weights["experts.down_proj"],
            "shared_w13": gate_then_up(weights, "shared_experts"),
            "shared_w2": weights["shared_experts.down_proj.weight"],
        },
        inner=INNER,
        num_shared_experts=2,
        backend="xla",
        router=dg.RouterConfig(
            top_k=4,
            scoring="sigmoid",
            num_groups=num_groups,
            top_groups=top_groups,
            renormalize=renormalize,
            scaling_factor=2.5,
        ),
    )
    compare(module, layer, tokens(COUNT, HIDDEN), scaling_factor=2.5)


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_moe_sparse_moe_block(renormalize):
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=renormalize,
        experts_implementation="eager",
    )
    module = Qwen3MoeSparseMoeBlock(config).eval()
    weights = fill(module, seed=9)
    layer = make_layer(
        {
            "gate_weight": weights["gate.weight"],
            "w13": weights["experts.gate_up_proj"],
            "w2": weights["experts.down_proj"],
        },
        inner=INNER,
        backend="xla",
        router=dg.RouterConfig(top_k=4, renormalize=renormalize),
    )
    compare(module, layer, tokens(COUNT, HIDDEN))
