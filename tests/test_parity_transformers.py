"""The layer against transformers' own modules: same weights, same tokens, eager, on the CPU.

The modules compute in f32 on weights and tokens that are bf16 numbers. Our bf16 recipe rounds to
bf16 at five places: gate and up, their product, each expert's row, the sum. Each is off by at most
u = 2**-9 of its value, with random signs, and silu passes on its gate's error at most 1.1 times: so
sqrt(1.1**2 + 4) u = 2.3 u = 0.45 % in the Frobenius norm if every one took its maximum.
"""

import importlib
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import error, every_backend, f64, gaussian, make_layer, run_step, tokens
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Experts,
    DeepseekV4HashRouter,
    DeepseekV4SparseMoeBlock,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
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


def by_id(ids, weights):
    """Slots in ascending order of id: transformers leaves the order of the chosen open."""
    ids, weights = np.asarray(ids), np.asarray(weights)
    order = np.argsort(ids, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(weights, order, axis=-1)


def same_routing(got, want_ids, want_weights, scaling_factor):
    """Identical ids; weights to f32 rounding, far within an ulp of bf16 (2**-8)."""
    ids, weights = by_id(got.topk_ids, got.topk_weights)
    # transformers has its scaling factor in the weights.
    want_ids, want_weights = by_id(want_ids, want_weights / scaling_factor)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)


# --- routers alone, with the experts and k of a published model

C = dg.RouterConfig
ROUTERS = {
    "deepseek_v3.DeepseekV3TopkRouter": (256, C.deepseek_v3()),
    "deepseek_v3.DeepseekV3TopkRouter of Kimi-K2": (384, C.kimi_k2()),
    "kimi_linear.KimiLinearTopkRouter": (256, C.kimi_k2(scaling_factor=2.446)),
    "deepseek_v4.DeepseekV4TopKRouter": (256, C.deepseek_v4()),
    "glm4_moe.Glm4MoeTopkRouter": (160, C.glm4_moe()),
    "minimax_m2.MiniMaxM2TopKRouter": (256, C.minimax_m2()),
    "qwen3_moe.Qwen3MoeTopKRouter": (128, C.qwen3_moe()),
    "mixtral.MixtralTopKRouter": (8, C.mixtral()),
    "gpt_oss.GptOssTopKRouter": (128, C.gpt_oss()),
    "granitemoe.GraniteMoeTopKRouter": (40, C.gpt_oss(top_k=8)),
    "qwen2_moe.Qwen2MoeTopKRouter": (60, C.qwen3_moe(top_k=4, renormalize=False)),
    "jamba.JambaTopKRouter": (16, C.mixtral(renormalize=False)),
    "deepseek_v2.DeepseekV2TopkRouter": (
        160,
        C(6, num_groups=8, top_groups=3, renormalize=False, scaling_factor=16.0),
    ),
    "ernie4_5_moe.Ernie4_5_MoeTopKRouter": (64, C(6)),
    "longcat_flash.LongcatFlashTopkRouter": (768, C(12, renormalize=False, scaling_factor=6.0)),
    "hy_v3.HYV3TopKRouter": (192, C(8, "sigmoid", scaling_factor=2.826)),
    "mistral4.Mistral4TopkRouter": (128, C(4, num_groups=4, top_groups=2)),
    "lfm2_moe.Lfm2MoeTopKRouter": (32, C(4, "sigmoid")),
}
# Others of transformers that have such a rule in code of their own.
OTHERS = {
    C(4, "sigmoid", num_groups=4, top_groups=2, scaling_factor=1.5): """
        axk1.AXK1TopkRouter axk2.AXK2TopkRouter bailing_hybrid.BailingHybridTopkRouter
        deepseek_v32.DeepseekV32TopkRouter dots1.Dots1TopkRouter exaone_moe.ExaoneMoeTopkRouter
        dots3_note.Dots3NoteTextTopkRouter glm4_moe_lite.Glm4MoeLiteTopkRouter
        glm4v_moe.Glm4vMoeTextTopkRouter glm5_next.Glm5NextTextTopkRouter
        glm_moe_dsa.GlmMoeDsaTopkRouter hy_v4.HYV4TopkRouter hy_v4_vl.HYV4VLTopkRouter
        mimo_v2_flash.MiMoV2FlashTopkRouter nemotron_h.NemotronHTopkRouter
        solar_open.SolarOpenTopkRouter""",
    C(4, "sigmoid"): """
        flint.FlintTopKRouter minimax_m3_vl.MiniMaxM3VLTopKRouter step3p7.Step3p7TopKRouter""",
    C(4): """
        granitemoehybrid.GraniteMoeHybridTopKRouter granitemoeshared.GraniteMoeSharedTopKRouter
        lara_mini.LaraMiniTopKRouter qwen3_5_moe.Qwen3_5MoeTopKRouter""",
}
ROUTERS |= {name: (64, router) for router, names in OTHERS.items() for name in names.split()}


@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_routers_choose_and_weigh_alike(name):
    num_experts, router = ROUTERS[name]
    family, cls = name.split()[0].split(".")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), num_experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), router.top_k),
        **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor"), router.scaling_factor),
        hidden_size=num_experts,
        n_group=router.num_groups,
        topk_group=router.top_groups,
        topk_method="group_limited_greedy",
        norm_topk_prob=router.renormalize,
        scoring_func=router.scoring,
        # the rest: what a router of one family reads besides
        zero_expert_num=0,
        router_bias=False,
        moe_norm_min=1e-12,
        use_expert_bias=True,
    )
    module = getattr(modeling, cls)(config).eval()
    rng = np.random.default_rng(num_experts)
    logits = rng.standard_normal((129, num_experts), np.float32) * 2
    # As large as the spread of the scores: it decides many choices, some against the score.
    spread = 0.02 if router.scoring == "softmax" else 0.3
    bias = rng.standard_normal(num_experts, np.float32) * np.float32(spread)
    given = None
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if path.endswith("e_score_correction_bias"):
            tensor.copy_(torch_f32(bias).reshape(tensor.shape))
            given = bias
        elif path == "bias":  # gpt-oss: a part of the logits
            tensor.copy_(torch_f32(bias))
        else:
            tensor.copy_(torch.eye(num_experts))  # so that the tokens are the logits
    args = [torch_f32(logits)]
    if len(inspect.signature(module.forward).parameters) == 2:
        args.append(torch_f32(bias))
        given = bias
    _, want_weights, want_ids = module(*args)
    if family == "gpt_oss":
        logits = logits + bias
    if family == "mistral4":  # ranks groups by their two best although it has no bias
        given = np.zeros_like(bias)
    got = dg.route(jnp.asarray(logits), router, bias=None if given is None else jnp.asarray(given))
    same_routing(got, want_ids.numpy(), want_weights.numpy(), router.scaling_factor)


@torch.no_grad()
def test_deepseek_v4_hash_router():
    router = dg.RouterConfig.deepseek_v4(selection="hash")
    config = DeepseekV4Config(hidden_size=256, vocab_size=1000, n_routed_experts=256)
    module = DeepseekV4HashRouter(config).eval()
    module.weight.copy_(torch.eye(256))
    rng = np.random.default_rng(0)
    table = rng.integers(0, 256, (1000, 6))
    module.tid2eid.copy_(torch.from_numpy(table))
    logits, token_ids = rng.standard_normal((129, 256), np.float32) * 2, rng.integers(0, 1000, 129)
    _, weights, ids = module(torch_f32(logits), torch.from_numpy(token_ids))
    got = dg.route(
        jnp.asarray(logits),
        router,
        token_ids=jnp.asarray(token_ids, jnp.int32),
        hash_table=jnp.asarray(table, jnp.int32),
    )
    np.testing.assert_array_equal(got.topk_ids, ids)  # in the table's order
    same_routing(got, ids.numpy(), weights.numpy(), config.routed_scaling_factor)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v4", "mixtral", "gpt_oss", "minimax_m2"]
)
def test_presets_are_the_published_values(family):
    """Of the families whose transformers defaults are those of the published checkpoint."""
    router = getattr(dg.RouterConfig, family)()
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    (config,) = (
        cls()
        for name, cls in vars(module).items()
        if name.endswith("Config") and name not in ("PreTrainedConfig", "PretrainedConfig")
    )
    assert router.top_k == config.num_experts_per_tok
    assert router.scaling_factor == getattr(config, "routed_scaling_factor", 1.0)
    assert router.num_groups == getattr(config, "n_group", 1)
    assert router.top_groups == getattr(config, "topk_group", 1)
    assert router.renormalize == getattr(config, "norm_topk_prob", True)
    if family == "deepseek_v4":
        assert router.scoring == config.scoring_func


# --- whole layers


@torch.no_grad()
def compare(module, layer, x, scaling_factor=1.0, token_ids=None):
    """Same experts for every token, weights to f32 rounding, outputs to bf16 rounding."""
    by_token = [] if token_ids is None else [torch.from_numpy(token_ids)]
    _, want_weights, want_ids = module.gate(torch_f32(x), *by_token)
    by_token_id = {} if token_ids is None else {"token_ids": jnp.asarray(token_ids, jnp.int32)}
    got = jax.jit(dg.route, static_argnames="router")(
        jnp.asarray(f64(x) @ f64(layer.raw["gate_weight"]).T, jnp.float32),
        layer.cfg.router,
        bias=layer.params.gate_bias,
        hash_table=layer.params.hash_table,
        **by_token_id,
    )
    routed = dg.Routing(
        *(slots[:, : want_ids.shape[1]] for slots in (got.topk_ids, got.topk_weights))
    )
    same_routing(routed, want_ids.numpy(), want_weights.numpy(), scaling_factor)
    want = module(torch_f32(x)[None], *(ids[None] for ids in by_token))[0].numpy()
    y = layer(x, **by_token_id)
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


@every_backend
@pytest.mark.parametrize(
    "experts, constants, activation",
    [
        (DeepseekV4Experts, dict(act_fn=torch.nn.functional.silu, limit=10.0), dg.SiLU(10.0)),
        (GptOssExperts, dict(alpha=1.702, limit=7.0), dg.OAISwiGLU()),
    ],
)
def test_clamped_activations(experts, constants, activation, backend):
    gateup = gaussian(np.random.default_rng(0), 16, 2 * INNER * 2, scale=8.0)
    gate, up = np.split(gateup, 2, axis=1)
    pairs = np.stack([gate, up], axis=-1).reshape(gateup.shape)
    given = torch_f32(pairs if experts is GptOssExperts else gateup)
    want = experts._apply_gate(SimpleNamespace(**constants), given)
    tiles = jnp.array([[0], [0], [16]], jnp.int32)
    kind, params = activation.params()
    rule = dict(tile=16, alignment=8, activation=kind, params=params)
    got = run_step(jnp.asarray(gateup), tiles, step="act", backend=backend, **rule)
    np.testing.assert_allclose(f64(got), f64(want.numpy()), rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("kind", ["hash_moe", "moe"])
def test_deepseek_v4_sparse_moe_block(kind):
    """Both routers, and a clamp of gate and up that bites in routed and shared experts."""
    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=16,
        num_experts_per_tok=4,
        vocab_size=50,
        num_hidden_layers=1,
        mlp_layer_types=[kind],
        swiglu_limit=0.75,
        experts_implementation="eager",
    )
    module = DeepseekV4SparseMoeBlock(config, 0).eval()
    weights = fill(module, seed=4)
    rng = np.random.default_rng(0)
    raw = {
        "gate_weight": weights["gate.weight"],
        "w13": weights["experts.gate_up_proj"],
        "w2": weights["experts.down_proj"],
        "shared_w13": gate_then_up(weights, "shared_experts"),
        "shared_w2": weights["shared_experts.down_proj.weight"],
    }
    token_ids, router = None, dg.RouterConfig.deepseek_v4(top_k=4)
    if kind == "hash_moe":
        router = dg.RouterConfig.deepseek_v4(top_k=4, selection="hash")
        token_ids, table = rng.integers(0, 50, COUNT), rng.integers(0, 16, (50, 4))
        module.gate.tid2eid.copy_(torch.from_numpy(table))
        raw["hash_table"] = table
    else:
        raw["gate_bias"] = rng.standard_normal(16, np.float32) * np.float32(0.2)
        module.gate.e_score_correction_bias.copy_(torch_f32(raw["gate_bias"]))
    layer = make_layer(
        raw,
        inner=INNER,
        num_shared_experts=1,
        activation=dg.SiLU(limit=0.75),
        backend="xla",
        router=router,
    )
    compare(module, layer, tokens(COUNT, HIDDEN), 1.5, token_ids)


@pytest.mark.parametrize("fused", [0, 1])
def test_qwen2_moe_sparse_moe_block(fused):
    """A shared expert with a gate of its own, as a dense block and as an expert among the others.
    The gated sum of the dense block is rounded once more than the five times above."""
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=INNER,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        experts_implementation="eager",
    )
    module = Qwen2MoeSparseMoeBlock(config).eval()
    weights = fill(module, seed=3)
    layer = make_layer(
        {
            "gate_weight": weights["gate.weight"],
            "w13": weights["experts.gate_up_proj"],
            "w2": weights["experts.down_proj"],
            "shared_w13": gate_then_up(weights, "shared_expert"),
            "shared_w2": weights["shared_expert.down_proj.weight"],
            "shared_gate_weight": weights["shared_expert_gate.weight"],
        },
        inner=INNER,
        num_shared_experts=1,
        backend="xla",
        router=dg.RouterConfig(4, renormalize=False, fused_shared_experts=fused),
    )
    compare(module, layer, tokens(COUNT, HIDDEN))
