"""Checkpoints: what transformers writes and what the hub holds, read a layer at a time; what
`dg.save` wrote; and damaged files, each refused with the file, the tensor and what was expected.
"""

import json
import struct
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from conftest import error, gaussian, moe_layer, same_bits, tokens
from safetensors import safe_open
from safetensors.numpy import save_file
from test_parity_transformers import WITHIN_BF16, fill, torch_f32
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import dgmoe_jax as dg
from dgmoe_jax.weights import hf
from dgmoe_jax.weights.families import FAMILIES

LAYER, HIDDEN, INNER, EXPERTS, VOCAB = 1, 192, 64, 8, 50
BF16, FP8, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def read(source, layer=LAYER, **kw):
    return hf.read_hf(source, layer, progress=False, **kw)


def load(source, layer=LAYER, **kw):
    return dg.load_hf(source, layer, progress=False, **kw)


def same_params(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        same_bits(a, b)


# --- written by transformers' own classes

_SMALL = dict(
    hidden_size=HIDDEN,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    num_experts_per_tok=3,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    experts_implementation="eager",
)
_MOE = dict(intermediate_size=96, moe_intermediate_size=INNER)
_LORA = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
_V4 = dict(
    moe_intermediate_size=INNER,
    n_routed_experts=EXPERTS,
    num_key_value_heads=1,
    head_dim=32,
    q_lora_rank=8,
    o_groups=2,
    o_lora_rank=8,
    index_n_heads=2,
    index_head_dim=8,
    sliding_window=8,
    swiglu_limit=0.75,  # bites in gate and up
)

MODELS = {
    "deepseek_v3": (
        "DeepseekV3",
        dict(n_routed_experts=EXPERTS, n_group=4, topk_group=2, n_shared_experts=2, **_MOE, **_LORA)
        | dict(first_k_dense_replace=1),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(num_experts=EXPERTS, head_dim=32, norm_topk_prob=True, **_MOE),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        dict(num_experts=EXPERTS, shared_expert_intermediate_size=2 * INNER, **_MOE),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=EXPERTS, intermediate_size=INNER)),
    "glm4_moe": (
        "Glm4Moe",
        dict(n_routed_experts=EXPERTS, head_dim=32, routed_scaling_factor=2.5, **_MOE),
    ),
    "minimax_m2": (
        "MiniMaxM2",
        dict(num_local_experts=EXPERTS, head_dim=32, intermediate_size=INNER),
    ),
    "gpt_oss": (
        "GptOss",
        dict(num_local_experts=EXPERTS, head_dim=32, intermediate_size=INNER),
    ),
    "deepseek_v4": ("DeepseekV4", {**_V4, "mlp_layer_types": ["hash_moe", "moe"]}),
    "deepseek_v4, hash": ("DeepseekV4", {**_V4, "mlp_layer_types": ["hash_moe", "hash_moe"]}),
}


@torch.no_grad()
def model_of(family, dtype=torch.float32):
    """A model with random bf16 numbers in its last layer's MoE block, zero biases in gpt-oss."""
    name, fields = MODELS[family]
    config = getattr(transformers, f"{name}Config")(**{**_SMALL, **fields})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    block = model.model.layers[LAYER].mlp
    fill(block, seed=len(family))
    rng = np.random.default_rng(1)
    for path, tensor in (*block.named_parameters(), *block.named_buffers()):
        if path.endswith("e_score_correction_bias"):
            tensor.copy_(torch_f32(rng.standard_normal(EXPERTS, np.float32) * np.float32(0.2)))
        elif path.endswith("bias"):
            tensor.zero_()
        elif path.endswith("tid2eid"):
            tensor.copy_(torch.from_numpy(rng.integers(0, EXPERTS, tensor.shape)))
    return model, model.to(dtype)


@torch.no_grad()
def compare(model, cfg, params, count=65):
    """Our layer against the block in f32 on the same numbers; both read bf16 tokens."""
    block = model.model.layers[LAYER].mlp.float()
    x = tokens(count, HIDDEN)
    ids = np.random.default_rng(2).integers(0, VOCAB, count)
    by_token = {}
    if "V4" in type(model).__name__:
        want = block(torch_f32(x)[None], torch.from_numpy(ids)[None])
    else:
        want = block(torch_f32(x)[None])
    if cfg.router.selection == "hash":
        by_token["token_ids"] = jnp.asarray(ids, jnp.int32)
    want = (want[0] if isinstance(want, tuple) else want)[0].numpy()
    got = moe_layer(jnp.asarray(x), params, cfg=cfg, **by_token)
    # One rounding more where the shared experts' gated sum is rounded: qwen2_moe.
    assert error(got, want.reshape(count, HIDDEN)) < WITHIN_BF16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", MODELS)
def test_what_transformers_saves(tmp_path, family, dtype):
    """In shards, of which those without the layer's tensors are gone."""
    model, stored = model_of(family, dtype)
    stored.save_pretrained(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    block = [name for name in index if f"layers.{LAYER}." in name]
    block = [name for name in block if any(b in name for b in (".mlp.", ".ffn.", "_moe."))]
    needed = {index[name] for name in block}
    others = set(index.values()) - needed
    assert len(needed) > 1 and others
    for file in others:
        (tmp_path / file).unlink()
    cfg, params = load(tmp_path, backend="xla")
    assert cfg.recipe == "bf16"
    assert (cfg.num_experts, cfg.hidden_size, cfg.intermediate_size) == (EXPERTS, HIDDEN, INNER)
    compare(model, cfg, params)


@pytest.mark.parametrize("family", MODELS)
def test_a_mapping_of_the_names_in_memory(family):
    """`state_dict()`: fused experts, transformers' own names; equals what it saves."""
    model, _ = model_of(family)
    config = json.loads(model.config.to_json_string(use_diff=False))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    cfg, params = load(state, config=config, backend="xla")
    compare(model, cfg, params)


@pytest.mark.parametrize("kind", ["kimi_k2", "deepseek_v32"])
def test_models_that_are_deepseek_v3_by_another_name(tmp_path, kind):
    _, stored = model_of("deepseek_v3")
    stored.save_pretrained(tmp_path)
    want = load(tmp_path)
    edit_config(tmp_path, model_type=kind)
    cfg, params = load(tmp_path)
    assert cfg == want[0]
    same_params(params, want[1])


def test_a_saved_block_in_one_file_and_one_expert_less_of_config(tmp_path):
    _, stored = model_of("mixtral")
    stored.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    load(tmp_path)
    edit_config(tmp_path, num_local_experts=EXPERTS - 1)
    with pytest.raises(ValueError, match=rf"gate\.weight: .*\({EXPERTS}, {HIDDEN}\), expected"):
        load(tmp_path)


# --- written by hand, as the hub holds them


def edit_config(folder, drop=(), **fields):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def write(folder, config, tensors, shards=1):
    """A folder as on the hub: shards and an index, or one file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names, where = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


V3_CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 512,
    "moe_intermediate_size": 160,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
QWEN_CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 192,
    "moe_intermediate_size": 160,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
V4_CONFIG = {
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "hidden_size": 192,
    "moe_intermediate_size": 160,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "vocab_size": VOCAB,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
E4, H4, I4 = 4, 192, 160
SHAPES = {"gate": (I4, H4), "up": (I4, H4), "down": (H4, I4)}
W = {"gate": "w1", "up": "w3", "down": "w2"}


def random_bytes(rng, *shape):
    return rng.integers(0, 256, shape, np.uint8)


def fp8(rng, *shape):
    return gaussian(rng, *shape, scale=100.0).astype(FP8)


def exponents(rng, *shape, around=120):
    return rng.integers(around - 3, around + 4, shape, np.uint8)


def fp8_block(rng, n, k, dtype=np.float32):
    """Values, and scales of 128 x 128 blocks in `dtype`."""
    shape = (-(-n // 128), -(-k // 128))
    if dtype is E8M0:
        return fp8(rng, n, k), exponents(rng, *shape).view(E8M0)
    return fp8(rng, n, k), (rng.random(shape, np.float32) / 256).astype(dtype)


def mxfp4(rng, n, k):
    return random_bytes(rng, n, k // 2).view(np.int8), exponents(rng, n, k // 32).view(E8M0)


def mxfp8(rng, n, k):
    return fp8(rng, n, k), exponents(rng, n, k // 32)


def as_stacked(experts):
    """w13 and w2 of [(gate, up, down)] pairs of values and scales, and their scales."""
    raw = {}
    for i, ending in ((0, ""), (1, "_scale")):
        raw["w13" + ending] = np.stack(
            [np.concatenate([e["gate"][i], e["up"][i]]) for e in experts]
        )
        raw["w2" + ending] = np.stack([e["down"][i] for e in experts])
    return raw


def matrices(rng, encode, **kw):
    return {name: encode(rng, *shape, **kw) for name, shape in SHAPES.items()}


def deepseek_v3(encode, layer=LAYER, seed=0, **kw):
    """Tensors in the hub's naming, and what `prepare_params` is to get."""
    rng = np.random.default_rng(seed)
    prefix = f"model.layers.{layer}.mlp."
    experts = [matrices(rng, encode, **kw) for _ in range(E4)]
    shared = matrices(rng, encode, **kw)
    tensors = {
        prefix + "gate.weight": gaussian(rng, E4, H4),
        prefix + "gate.e_score_correction_bias": rng.standard_normal(E4, np.float32),
        "model.norm.weight": gaussian(rng, H4),
        f"model.layers.{layer}.post_attention_layernorm.weight": gaussian(rng, H4),
    }
    raw = {
        "gate_weight": tensors[prefix + "gate.weight"],
        "gate_bias": tensors[prefix + "gate.e_score_correction_bias"],
        **as_stacked(experts),
        **{f"shared_{name}": x[0] for name, x in as_stacked([shared]).items()},
    }
    named = [(f"experts.{e}.", m) for e, m in enumerate(experts)] + [("shared_experts.", shared)]
    for below, block in named:
        for name, (values, scales) in block.items():
            tensors[f"{prefix}{below}{name}_proj.weight"] = values
            tensors[f"{prefix}{below}{name}_proj.weight_scale_inv"] = scales
    return tensors, raw


def same_raw(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        same_bits(got[name], array)


@pytest.mark.parametrize("shards", [1, 3])
def test_deepseek_v3_block_fp8_keeps_its_scales(tmp_path, shards):
    tensors, raw = deepseek_v3(fp8_block)
    write(tmp_path, V3_CONFIG, tensors, shards)
    cfg, got = read(tmp_path)
    same_raw(got, raw)
    assert cfg == dg.MoEConfig(
        num_experts=4,
        hidden_size=192,
        intermediate_size=160,
        router=dg.RouterConfig.deepseek_v3(top_k=2, num_groups=2, top_groups=1),
        recipe="fp8_block",
        num_shared_experts=1,
    )
    loaded, params = load(tmp_path, backend="xla", layout="contiguous")
    assert (loaded.backend, loaded.layout) == ("xla", "contiguous")
    same_params(params, dg.prepare_params(raw, cfg))
    assert np.isfinite(np.asarray(moe_layer(jnp.asarray(tokens(5, 192)), params, cfg=cfg))).all()


def test_the_predictor_of_further_tokens_is_the_layer_after_the_last(tmp_path):
    tensors, raw = deepseek_v3(fp8_block, layer=3)
    write(tmp_path, V3_CONFIG, tensors)
    same_raw(read(tmp_path, 3)[1], raw)
    with pytest.raises(ValueError, match=r"layer=4: must be in \[0, 4\)"):
        read(tmp_path, 4)


def test_scales_in_bf16_and_e8m0_are_widened_exactly(tmp_path):
    for dtype in (BF16, E8M0):
        tensors, raw = deepseek_v3(fp8_block, dtype=dtype)
        write(tmp_path, V3_CONFIG, tensors)
        raw = {n: x.astype(np.float32) if n.endswith("_scale") else x for n, x in raw.items()}
        same_raw(read(tmp_path)[1], raw)


def test_qwen3_moe_block_fp8(tmp_path):
    tensors, raw = deepseek_v3(fp8_block, dtype=BF16)
    gone = ("e_score_correction_bias", "shared_experts")
    tensors = {n: x for n, x in tensors.items() if not any(g in n for g in gone)}
    write(tmp_path, QWEN_CONFIG, tensors)
    cfg, got = read(tmp_path)
    raw = {n: x for n, x in raw.items() if "shared" not in n and n != "gate_bias"}
    same_raw(got, {n: x.astype(np.float32) if "scale" in n else x for n, x in raw.items()})
    assert cfg.router == dg.RouterConfig.qwen3_moe(top_k=2)
    load(tmp_path)


def test_per_tensor_scales_become_those_of_every_block(tmp_path):
    """In the shapes () and (1,), with static scales of the activations, which are not read."""

    def one_scale(rng, n, k):
        scale = np.float32(rng.random())
        return fp8(rng, n, k), np.full((-(-n // 128), -(-k // 128)), scale)

    tensors, raw = deepseek_v3(one_scale)
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        stem, scales = name.removesuffix("weight_scale_inv"), tensors.pop(name)
        tensors[stem + "weight_scale"] = scales[:1, :1].reshape(() if "experts.0" in name else 1)
        tensors[stem + "input_scale"] = np.ones((), np.float32)
    write(tmp_path, V3_CONFIG, tensors)
    same_raw(read(tmp_path)[1], raw)
    load(tmp_path)


def test_mxfp8(tmp_path):
    tensors, raw = deepseek_v3(mxfp8)
    write(tmp_path, V3_CONFIG | {"quantization_config": {"quant_method": "mxfp8"}}, tensors)
    cfg, got = read(tmp_path)
    assert cfg.recipe == "mxfp8"
    same_raw(got, raw)


def deepseek_v4(hashed, shared_dtype=E8M0):
    rng = np.random.default_rng(4)
    prefix = f"layers.{0 if hashed else 2}.ffn."
    experts = [matrices(rng, mxfp4) for _ in range(E4)]
    shared = matrices(rng, fp8_block, dtype=shared_dtype)
    tensors = {prefix + "gate.weight": gaussian(rng, E4, H4)}
    raw = {"gate_weight": tensors[prefix + "gate.weight"], **as_stacked(experts)}
    raw = {n: x.view(np.uint8) if n != "gate_weight" else x for n, x in raw.items()}
    if hashed:
        tensors[prefix + "gate.tid2eid"] = rng.integers(0, E4, (VOCAB, 2))
        raw["hash_table"] = tensors[prefix + "gate.tid2eid"]
    else:
        tensors[prefix + "gate.bias"] = rng.standard_normal(E4, np.float32)
        raw["gate_bias"] = tensors[prefix + "gate.bias"]
    named = [(f"experts.{e}.", m) for e, m in enumerate(experts)] + [("shared_experts.", shared)]
    for below, block in named:
        for name, (values, scales) in block.items():
            tensors[f"{prefix}{below}{W[name]}.weight"] = values
            tensors[f"{prefix}{below}{W[name]}.scale"] = scales
    return tensors, raw, as_stacked([shared])


def decoded_block(values, scales):
    """[..., N, K] in f64, of scales of 128 x 128 blocks."""
    scales = scales.astype(np.float64).repeat(128, -2).repeat(128, -1)
    return values.astype(np.float64) * scales[..., : values.shape[-2], : values.shape[-1]]


@pytest.mark.parametrize(
    ("arch", "backend"), [("cpu", "xla"), ("sm90", "emulator"), ("sm100", "emulator")]
)
def test_deepseek_v4_keeps_its_shared_experts(tmp_path, arch, backend):
    tensors, _, shared = deepseek_v4(False)
    write(tmp_path, V4_CONFIG, tensors)
    cfg, params = load(tmp_path, 2, arch=arch, backend=backend)
    got = np.asarray(dg.dequantize(params.shared.w2))[0]
    want = decoded_block(shared["w2"][0], shared["w2_scale"][0])
    np.testing.assert_array_equal(got[: want.shape[0], : want.shape[1]], want)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, cfg.hidden_size)).astype(BF16))
    y = [moe_layer(x, params, cfg=cfg)]
    cfg, params = load(tmp_path, 2, arch="cpu", backend="xla")
    y.append(moe_layer(x, params, cfg=cfg))
    # Each quantises activations in its own way, 4 to 6 % from the exact ones.
    assert error(*(np.asarray(one, np.float64) for one in y)) < 0.12


@pytest.mark.parametrize("hashed", [True, False])
def test_deepseek_v4_mxfp4_experts_beside_fp8_shared_experts(tmp_path, hashed):
    tensors, raw, shared = deepseek_v4(hashed)
    write(tmp_path, V4_CONFIG, tensors, shards=2)
    cfg, got = read(tmp_path, 0 if hashed else 2)
    for name, values in shared.items():
        raw[f"shared_{name}"] = values[0].astype(np.float32) if "scale" in name else values[0]
    same_raw(got, raw)
    assert cfg.recipe == "mxfp4" and cfg.activation == dg.SiLU(limit=10.0)
    assert cfg.router == dg.RouterConfig.deepseek_v4(
        top_k=2, selection="hash" if hashed else "scores"
    )


def test_another_recipe_than_the_stored_one_is_dequantised_exactly(tmp_path):
    """To bf16, where FP8's values times powers of two and MXFP4's are numbers; asked, so silent."""
    tensors, raw, shared = deepseek_v4(False)
    write(tmp_path, V4_CONFIG, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg, got = read(tmp_path, 2, recipe="bf16")
        loaded, params = load(tmp_path, 2, recipe="fp8_block")
    assert cfg.recipe == "bf16" and loaded.recipe == "fp8_block"
    assert params.shared.w13.values.dtype == FP8  # as stored
    same_bits(np.asarray(params.shared.w13.values)[0, :I4, :H4], shared["w13"][0, :I4])
    codes = np.stack([raw["w2"] & 15, raw["w2"] >> 4], -1).reshape(E4, H4, I4)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want = np.where(codes & 8, -1, 1) * table[codes & 7]
    want = want * 2.0 ** (raw["w2_scale"].astype(int).repeat(32, -1) - 127)
    np.testing.assert_array_equal(got["w2"].astype(np.float64), want)
    load(tmp_path, 2, recipe="bf16")


GPT_OSS_CONFIG = {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}


def gpt_oss():
    rng, prefix = np.random.default_rng(5), f"model.layers.{LAYER}.mlp."
    return {
        prefix + "router.weight": gaussian(rng, E4, H4),
        prefix + "router.bias": np.zeros(E4, BF16),
        prefix + "experts.gate_up_proj_blocks": random_bytes(rng, E4, 2 * I4, H4 // 32, 16),
        prefix + "experts.gate_up_proj_scales": exponents(rng, E4, 2 * I4, H4 // 32),
        prefix + "experts.gate_up_proj_bias": np.zeros((E4, 2 * I4), BF16),
        prefix + "experts.down_proj_blocks": random_bytes(rng, E4, H4, I4 // 32, 16),
        prefix + "experts.down_proj_scales": exponents(rng, E4, H4, I4 // 32),
        prefix + "experts.down_proj_bias": np.zeros((E4, H4), BF16),
    }


def test_gpt_oss_without_its_limit_has_that_of_the_model():
    """transformers 5.17 writes none."""
    config = {key: value for key, value in GPT_OSS_CONFIG.items() if key != "swiglu_limit"}
    assert load(gpt_oss(), config=config, recipe="bf16")[0].activation == dg.OAISwiGLU(1.702, 7.0)


def test_gpt_oss_mxfp4_reads_as_transformers_decodes_it(tmp_path):
    tensors, prefix = gpt_oss(), f"model.layers.{LAYER}.mlp.experts."
    write(tmp_path, GPT_OSS_CONFIG, tensors)
    cfg, raw = read(tmp_path)
    assert cfg.recipe == "mxfp4" and cfg.activation == dg.OAISwiGLU()
    assert cfg.router == dg.RouterConfig.gpt_oss(top_k=2)
    assert {n: (x.dtype.name, x.shape) for n, x in raw.items() if n != "gate_weight"} == {
        "w13": ("uint8", (E4, 2 * I4, H4 // 2)),
        "w13_scale": ("uint8", (E4, 2 * I4, H4 // 32)),
        "w2": ("uint8", (E4, H4, I4 // 2)),
        "w2_scale": ("uint8", (E4, H4, I4 // 32)),
    }
    _, got = read(tmp_path, recipe="bf16")
    for operand, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        blocks, scales = (
            torch.from_numpy(tensors[prefix + name + e]) for e in ("_blocks", "_scales")
        )
        want = convert_moe_packed_tensors(blocks, scales).float().numpy().swapaxes(1, 2)
        if operand == "w13":
            want = np.concatenate([want[:, ::2], want[:, 1::2]], axis=1)
        np.testing.assert_array_equal(got[operand].astype(np.float32), want)


@pytest.mark.parametrize(
    "name", ["router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"]
)
def test_gpt_oss_biases_are_refused_by_name(tmp_path, name):
    tensors = gpt_oss()
    tensors[f"model.layers.{LAYER}.mlp.{name}"].flat[-1] = 1e-3
    write(tmp_path, GPT_OSS_CONFIG, tensors)
    with pytest.raises(
        NotImplementedError, match=rf"model\.safetensors: \['[^,]*{name}'\]: .*zeros"
    ):
        load(tmp_path)


def test_no_second_copy_of_the_layer_is_made(tmp_path):
    """What Python holds at its peak: the result, and little more than an expert in f32."""
    config = V3_CONFIG | {"n_routed_experts": 64, "n_group": 1, "n_shared_experts": 0}
    rng, prefix = np.random.default_rng(0), f"model.layers.{LAYER}.mlp."
    tensors = {
        prefix + "gate.weight": gaussian(rng, 64, H4),
        prefix + "gate.e_score_correction_bias": np.zeros(64, np.float32),
    }
    for e in range(64):
        for name, shape in SHAPES.items():
            values, scales = fp8_block(rng, *shape)
            tensors[f"{prefix}experts.{e}.{name}_proj.weight"] = values
            tensors[f"{prefix}experts.{e}.{name}_proj.weight_scale_inv"] = scales
    write(tmp_path, config, tensors, shards=2)
    for recipe in ("fp8_block", "bf16"):
        read(tmp_path, recipe=recipe)  # what is compiled and cached once
        tracemalloc.start()
        _, raw = read(tmp_path, recipe=recipe)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < sum(x.nbytes for x in raw.values()) + 4 * 3 * I4 * H4 + 1e6, recipe


# --- dense layers, and what config.json says


@pytest.mark.parametrize(
    "layer, fields, by",
    [
        (0, {}, "first_k_dense_replace=1"),
        (1, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (1, {"moe_layer_freq": [0, 0, 1]}, r"moe_layer_freq=\[0, 0, 1\]"),
        (1, {"decoder_sparse_step": 3}, "decoder_sparse_step=3"),
        (1, {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        (1, {"mlp_layer_types": ["dense", "dense", "moe"]}, "mlp_layer_types="),
    ],
)
def test_a_dense_layer_is_said_to_be_dense(tmp_path, layer, fields, by):
    write(tmp_path, V3_CONFIG | fields, deepseek_v3(fp8_block)[0])
    with pytest.raises(ValueError, match=f"layer={layer}: dense, not MoE, by {by}.*config.json"):
        load(tmp_path, layer)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "llama"}, r"config\.json: model_type='llama', must be in \["),
        ({"hidden_act": "gelu"}, r"config\.json: hidden_act='gelu', must be in"),
        ({"topk_method": "greedy"}, r"config\.json: topk_method='greedy'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"config\.json: quant_method='gptq'"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                }
            },
            r"config\.json: quant_method='compressed-tensors', format='pack-quantized'",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"config\.json: weight_block_size=\[64, 64\], must be \[128, 128\]",
        ),
    ],
)
def test_models_that_are_not_known_are_refused_by_name(tmp_path, fields, message):
    write(tmp_path, V3_CONFIG | fields, deepseek_v3(fp8_block)[0])
    with pytest.raises(NotImplementedError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "n_group", "n_routed_experts", "norm_topk_prob"])
def test_a_key_that_config_lacks_is_named(tmp_path, key):
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0])
    edit_config(tmp_path, drop=[key])
    asked = "num_experts" if key == "n_routed_experts" else key
    with pytest.raises(ValueError, match=rf"config\.json: no '{asked}'"):
        load(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace='1': says nothing"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0: says nothing"),
        ({"hidden_size": "192"}, "hidden_size='192', expected a positive int"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None, expected a positive int"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8', expected a table"),
    ],
)
def test_values_that_config_cannot_have_are_named(tmp_path, fields, message):
    write(tmp_path, V3_CONFIG | fields, deepseek_v3(fp8_block)[0])
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        load(tmp_path)


def test_every_family_reads_its_router_from_fields_that_exist():
    for name, family in FAMILIES.items():
        fields = set(dg.RouterConfig.__dataclass_fields__)
        assert set(family.router) <= fields, name
        assert set(family.activation_fields) <= set(family.activation.__dataclass_fields__), name


def test_bad_arguments_are_named_before_anything_is_read(tmp_path):
    tensors, _ = deepseek_v3(fp8_block)
    write(tmp_path, V3_CONFIG, tensors)
    with pytest.raises(ValueError, match="recipe='fp4'"):
        load(tmp_path, recipe="fp4")
    with pytest.raises(TypeError, match="layer='1'"):
        load(tmp_path, "1")
    with pytest.raises(ValueError, match="layer=-1"):
        load(tmp_path, -1)
    with pytest.raises(FileNotFoundError, match="nowhere: must be a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="config: missing"):
        load(tensors)
    with pytest.raises(TypeError, match=r"mlp\.gate\.weight: Tensor, .*from_dlpack"):
        name = f"model.layers.{LAYER}.mlp.gate.weight"
        load(tensors | {name: torch.zeros(4, 192)}, config=V3_CONFIG)


# --- damage

EXPERT = f"model.layers.{LAYER}.mlp.experts.2."


def _without(name):
    return lambda t: t.pop(name)


def _instead(name, change):
    return lambda t: t.update({name: change(t[name])})


BLOCKS = r"float32 or bfloat16 or float8_e8m0fnu \(2, 2\)"
DAMAGE = {
    "missing scale": (
        _without(EXPERT + "up_proj.weight_scale_inv"),
        rf"no tensor '{EXPERT}up_proj.weight_scale_inv', expected {BLOCKS}",
    ),
    "missing scale of the first": (
        _without(f"model.layers.{LAYER}.mlp.experts.0.gate_proj.weight_scale_inv"),
        r"safetensors: \S+experts.0.gate_proj.weight: float8_e4m3fn \(160, 192\) without a scale"
        rf" \S+experts.0.gate_proj.weight_scale_inv or .*expected .* with scales {BLOCKS}",
    ),
    "missing weight": (
        _without(EXPERT + "down_proj.weight"),
        rf"no tensor '{EXPERT}down_proj.weight', expected float8_e4m3fn \(192, 160\)",
    ),
    "an expert short": (
        lambda t: [t.pop(n) for n in [*t] if ".experts.3." in n],
        r"no tensor '\S+\.mlp\.experts\.3\.gate_proj\.weight', expected float8_e4m3fn \(160, 192\)",
    ),
    "the first expert short": (
        lambda t: [t.pop(n) for n in [*t] if ".experts.0." in n],
        r"no tensor '\S+\.experts\.0\.gate_proj\.weight', expected .*float8_e4m3fn \(160, 192\)",
    ),
    "an expert more": (
        lambda t: t.update(
            {n.replace(".3.", ".4."): x for n, x in t.items() if ".experts.3." in n}
        ),
        r"safetensors: 6 tensors that nothing reads, \['\S+experts.4.down_proj.weight'.*4 experts",
    ),
    "wrong shape": (
        _instead(EXPERT + "gate_proj.weight", lambda x: x[:-1].copy()),
        rf"safetensors: {EXPERT}gate_proj.weight: float8_e4m3fn \(159, 192\), expected"
        r" float8_e4m3fn \(160, 192\)",
    ),
    "wrong shape of a scale": (
        _instead(EXPERT + "gate_proj.weight_scale_inv", lambda x: x[:1].copy()),
        rf"safetensors: {EXPERT}gate_proj.weight_scale_inv: float32 \(1, 2\), expected {BLOCKS}",
    ),
    "wrong shape of every scale": (
        lambda t: t.update({n: x[:1].copy() for n, x in t.items() if n.endswith("scale_inv")}),
        rf"scale_inv: float32 \(1, 2\), expected {BLOCKS}; .*; uint8 or float8_e8m0fnu \(160, 6\)",
    ),
    "wrong dtype": (
        _instead(EXPERT + "gate_proj.weight", lambda x: x.astype(BF16)),
        rf"safetensors: {EXPERT}gate_proj.weight: bfloat16 \(160, 192\), expected float8_e4m3fn",
    ),
    "wrong dtype of the first": (
        lambda t: t.update(
            {n: x.view(ml_dtypes.float8_e5m2) for n, x in t.items() if x.dtype == FP8}
        ),
        r"safetensors: \S+experts.0.gate_proj.weight: float8_e5m2 \(160, 192\) with a scale"
        r" .weight_scale_inv, expected bfloat16 or .*; float8_e4m3fn \(160, 192\) with",
    ),
    "wrong dtype of a scale": (
        _instead(EXPERT + "gate_proj.weight_scale_inv", lambda x: x.astype(np.float16)),
        rf"{EXPERT}gate_proj.weight_scale_inv: float16 \(2, 2\), expected {BLOCKS}",
    ),
    "w2 stored otherwise": (
        lambda t: [
            (t.update({n: x.astype(BF16)}), t.pop(n + "_scale_inv"))
            for n, x in [*t.items()]
            if n.endswith("down_proj.weight")
        ],
        r"experts.0.down_proj.weight: stored for recipe 'bf16', expected 'fp8_block' as",
    ),
    "scales beside bf16": (
        lambda t: t.update({n: x.astype(BF16) for n, x in t.items() if x.dtype == FP8}),
        r"experts.0.gate_proj.weight: bfloat16 \(160, 192\) with a scale .weight_scale_inv,"
        r" expected bfloat16 or float16 or float32 \(160, 192\)$",
    ),
    "no correction bias": (
        _without(f"model.layers.{LAYER}.mlp.gate.e_score_correction_bias"),
        r"no tensor '\S+gate.e_score_correction_bias', expected .*float32 \(4,\)",
    ),
    "no shared experts": (
        lambda t: [t.pop(n) for n in [*t] if "shared_experts" in n],
        r"no tensor '\S+\.shared_experts\.gate_proj\.weight', expected",
    ),
    "no such layer": (
        lambda t: [t.pop(n) for n in [*t] if f"layers.{LAYER}." in n],
        rf"no experts of layer {LAYER}, expected names like '\S+experts.0.gate_proj.weight'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_tensors_are_refused_by_name(tmp_path, damage, shards):
    spoil, message = DAMAGE[damage]
    tensors, _ = deepseek_v3(fp8_block)
    spoil(tensors)
    write(tmp_path, V3_CONFIG, tensors, shards)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def _shard_of(folder, name):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def test_a_missing_shard_is_named_with_the_tensor(tmp_path):
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0], shards=3)
    name = EXPERT + "gate_proj.weight"
    shard = _shard_of(tmp_path, name)
    (tmp_path / shard).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{shard}: missing; .*index.json says it holds"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0], shards=2)
    path = tmp_path / _shard_of(tmp_path, EXPERT + "gate_proj.weight")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"{path.name}: not a whole safetensors file"):
        load(tmp_path)


def test_a_header_that_claims_more_than_the_file_is_refused(tmp_path):
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0])
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "index.json: not JSON"),
        ("[]", "index.json: list, expected a JSON object"),
        ("{}", "index.json: no 'weight_map'"),
        ('{"weight_map": {"a": 1}}', "index.json: no 'weight_map'"),
        ('{"weight_map": {"a": "../b.safetensors"}}', r"index.json: files \['../b.safetensors'\]"),
        ('{"weight_map": {"a": "b.safetensors"}}', "index.json: no experts of layer 1"),
    ],
)
def test_a_corrupted_index_is_named(tmp_path, content, message):
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0], shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "shard", "config.json"])
def test_bytes_that_flipped_give_an_error_that_says_so_or_do_not_matter(tmp_path, file):
    """In the header of a shard, the index or config.json; never an error of some other kind."""
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0], shards=2)
    path = tmp_path / (_shard_of(tmp_path, EXPERT + "up_proj.weight") if file == "shard" else file)
    whole, refused = path.read_bytes(), 0
    length = 8 + int.from_bytes(whole[:8], "little") if file == "shard" else len(whole)
    rng = np.random.default_rng(0)
    for _ in range(100):
        spoilt = bytearray(whole)
        spoilt[rng.integers(length)] ^= 1 << rng.integers(8)
        path.write_bytes(spoilt)
        try:
            read(tmp_path)
        except (ValueError, FileNotFoundError, NotImplementedError, TypeError) as error:
            refused += 1
            assert str(tmp_path) in str(error) or "RouterConfig" in str(error), error
    assert refused > 30


def test_an_index_that_names_the_wrong_shard_is_named(tmp_path):
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0], shards=2)
    path, name = tmp_path / "model.safetensors.index.json", EXPERT + "gate_proj.weight"
    index = json.loads(path.read_text())
    (other,) = set(index["weight_map"].values()) - {index["weight_map"][name]}
    index["weight_map"][name] = other
    path.write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=rf"{other}: no tensor '{name}', expected .*; .*index.json"
    ):
        load(tmp_path)


def test_a_folder_without_weights_or_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V3_CONFIG))
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor"):
        load(tmp_path)
    write(tmp_path, V3_CONFIG, deepseek_v3(fp8_block)[0])
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json: missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t[:-1],
            rf"gate.tid2eid: int64 \(49, 2\), expected int64 or int32 \({VOCAB}, 2\)",
        ),
        (lambda t: t + 2**32, r"gate.tid2eid: ids 42949\d+..42949\d+, expected ids in \[0, 4\)"),
        (lambda t: t.astype(np.float32), "gate.tid2eid: float32"),
        (None, r"no tensor 'layers.0.ffn.gate.tid2eid', expected int64 or int32"),
    ],
)
def test_a_damaged_hash_table_is_named(tmp_path, change, message):
    tensors, _, _ = deepseek_v4(True)
    table = tensors.pop("layers.0.ffn.gate.tid2eid")
    if change:
        tensors["layers.0.ffn.gate.tid2eid"] = np.ascontiguousarray(change(table))
    write(tmp_path, V4_CONFIG, tensors)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, 0)


def test_fused_blocks_that_span_gate_and_up_are_refused(tmp_path):
    rng, prefix = np.random.default_rng(0), f"model.layers.{LAYER}.mlp."
    tensors = {
        prefix + "gate.weight": gaussian(rng, E4, H4),
        prefix + "experts.gate_up_proj": fp8(rng, E4, 2 * I4, H4),
        prefix + "experts.gate_up_proj_scale_inv": np.ones((E4, 4, 2), np.float32),
        prefix + "experts.down_proj": fp8(rng, E4, H4, I4),
        prefix + "experts.down_proj_scale_inv": np.ones((E4, 2, 2), np.float32),
    }
    write(tmp_path, QWEN_CONFIG, tensors)
    with pytest.raises(NotImplementedError, match="gate_up_proj_scale_inv: a scale of 128 rows"):
        load(tmp_path)


# --- prepared parameters


def prepared(recipe="fp8_block", **kw):
    tensors, _ = deepseek_v3(fp8_block)
    return load(tensors, config=V3_CONFIG, recipe=recipe, **kw)


def test_every_dtype_is_stored_bit_for_bit(tmp_path):
    """NaN patterns, -0.0 and all: the bytes that were there."""
    from dgmoe_jax.weights import store
    from dgmoe_jax.weights.tensors import open_file

    rng, arrays = np.random.default_rng(0), {}
    for dtype in (FP8, E8M0, BF16, np.uint8, np.int8, np.float32, np.float16, np.int32):
        every = random_bytes(rng, 7, 64).view(dtype)
        store._to_json(jnp.asarray(every), arrays, np.dtype(dtype).name)
    save_file(arrays, tmp_path / "x")
    tensors, _ = open_file(tmp_path / "x")
    for name, array in arrays.items():
        got = store._from_json({"array": name}, tensors)
        assert got.dtype == array.dtype
        same_bits(got, array)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_saved_params_come_back_bit_for_bit(tmp_path, recipe):
    cfg, params = prepared(recipe)
    dg.save(tmp_path / "layer", cfg, params)
    assert [p.name for p in tmp_path.iterdir()] == ["layer"]
    got, loaded = dg.load(tmp_path / "layer")
    assert got == cfg and hash(got) == hash(cfg)
    same_params(loaded, params)
    x = jnp.asarray(tokens(5, 192))
    same_bits(moe_layer(x, loaded, cfg=got), moe_layer(x, params, cfg=cfg))
    # What came back is not the file's own memory.
    with open(tmp_path / "layer", "r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))
    same_params(loaded, params)


def test_a_table_and_a_clamp_come_back_too(tmp_path):
    tensors, _, _ = deepseek_v4(True)
    cfg, params = load(tensors, 0, config=V4_CONFIG, recipe="fp8_block")
    dg.save(tmp_path / "layer", cfg, params)
    got, loaded = dg.load(tmp_path / "layer", cfg)
    assert got == cfg and got.activation == dg.SiLU(limit=10.0)
    same_params(loaded, params)
    gpt_cfg, gpt_params = load(gpt_oss(), config=GPT_OSS_CONFIG, recipe="bf16")
    dg.save(tmp_path / "gpt", gpt_cfg, gpt_params)
    assert dg.load(tmp_path / "gpt")[0] == gpt_cfg


def test_a_config_that_does_not_match_is_refused(tmp_path):
    cfg, params = prepared()
    dg.save(tmp_path / "layer", cfg, params)
    other = dict(layout="masked", backend="xla")
    assert dg.load(tmp_path / "layer", _with(cfg, **other))[0] == _with(cfg, **other)
    for fields, message in (
        (dict(recipe="bf16"), "recipe='fp8_block', expected 'bf16'"),
        (
            dict(activation=dg.SiLU(1.0)),
            r"activation=SiLU\(.*limit=None\), expected SiLU\(.*limit=1.0\)",
        ),
        (dict(hidden_size=191), "hidden_size=192, expected 191"),
    ):
        with pytest.raises(ValueError, match=f"layer: prepared for {message}"):
            dg.load(tmp_path / "layer", _with(cfg, **fields))
    with pytest.raises(ValueError, match="params"):
        dg.save(tmp_path / "no", _with(cfg, recipe="bf16"), params)
    assert not (tmp_path / "no").exists()


def _with(cfg, **fields):
    return dg.MoEConfig(**{name: getattr(cfg, name) for name in cfg.__dataclass_fields__} | fields)


def _resave(path, change):
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    from dgmoe_jax.weights.tensors import open_file

    arrays = {name: np.array(t.read()) for name, t in open_file(path)[0].items()}
    change(arrays, metadata)
    save_file(arrays, path, metadata)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a, m: m.update(dgmoe_jax="0"), "layer: version 0, expected version 1"),
        (lambda a, m: m.pop("dgmoe_jax"), "layer: not written by dgmoe_jax.save, expected"),
        (lambda a, m: m.pop("cfg"), "layer: not as version 1 .*'cfg'"),
        (lambda a, m: m.update(cfg="{"), "layer: not as version 1"),
        (lambda a, m: m.update(cfg="3"), "layer: not as version 1"),
        (lambda a, m: m.update(params=m["cfg"]), "layer: not as version 1"),
        (
            lambda a, m: m.update(params=m["params"].replace("w13", "w31")),
            "layer: not as version 1",
        ),
        (lambda a, m: a.pop("experts.w13.scales"), "layer: .*no tensor 'experts.w13.scales'"),
        (
            lambda a, m: a.update({"experts.w2.values": a["experts.w2.values"][1:].copy()}),
            r"layer: params.experts.w2: shape \(3, 256, 256\), must be \(4, 256, 256\)",
        ),
        (
            lambda a, m: a.update({"experts.w2.values": a["experts.w2.values"].astype(BF16)}),
            r"layer: params.experts.w2: dtype bfloat16, must be float8_e4m3fn",
        ),
    ],
)
def test_a_file_that_is_not_what_save_writes_is_refused(tmp_path, change, message):
    path = tmp_path / "layer"
    dg.save(path, *prepared())
    _resave(path, change)
    with pytest.raises(ValueError, match=message):
        dg.load(path)


def test_a_truncated_or_missing_store_is_named(tmp_path):
    path = tmp_path / "layer"
    with pytest.raises(FileNotFoundError, match="layer: missing"):
        dg.load(path)
    dg.save(path, *prepared())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="layer: not a whole safetensors file"):
        dg.load(path)
