"""The demo's parts: GGUF loading and the Llama forward, the split, the router fit, the score."""

import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dgmoe_jax as dg

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import demo  # noqa: E402
import smollm  # noqa: E402

BYTES = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
MERGES = ["Ġ a", "1 2"]


def write_gguf(path: Path, llama) -> dict:
    """A transformers Llama as a Q4_1 GGUF; returns the state dict that survives the rounding."""
    cfg, kept = llama.config, {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base(cfg.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(BYTES + [m.replace(" ", "") for m in MERGES])
    writer.add_token_merges(MERGES)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, cfg.num_hidden_layers)
    for name, tensor in llama.state_dict().items():
        if name == "lm_head.weight":
            continue
        data, to_name = tensor.numpy(), names.get_name(name, try_suffixes=(".weight",))
        if data.ndim == 1:
            writer.add_tensor(to_name, data)
            kept[name] = data
            continue
        q4 = gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quantize(data, q4)
        kept[name] = gguf.dequantize(packed, q4)
        heads = {"q_proj": cfg.num_attention_heads, "k_proj": cfg.num_key_value_heads}
        if count := heads.get(name.split(".")[-2]):
            # llama.cpp stores the two coordinates of one rotation next to each other.
            packed = packed.reshape(count, 2, -1, packed.shape[1]).swapaxes(1, 2)
            packed = np.ascontiguousarray(packed).reshape(len(data), -1)
        writer.add_tensor(to_name, packed, raw_dtype=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_forward_of_a_gguf_is_transformers_llama(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(BYTES) + len(MERGES),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    ).eval()
    kept = write_gguf(tmp_path / "tiny.gguf", llama)
    kept["lm_head.weight"] = kept["model.embed_tokens.weight"]
    llama.load_state_dict({name: torch.tensor(data) for name, data in kept.items()})

    model, weights, tokenizer = smollm.load(tmp_path / "tiny.gguf")
    tokens = np.random.default_rng(0).integers(0, len(BYTES), 40)
    ours, _ = smollm.forward(weights, tokens, model, smollm.dense_mlp, weights["mlp"])
    with torch.no_grad():
        theirs = llama(torch.tensor(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())
    # Digits stay single, in spite of the merge; a space joins the letter after it.
    assert tokenizer.encode("x a12").tokens == ["x", "Ġa", "1", "2"]


@pytest.fixture
def mlp():
    keys = jax.random.split(jax.random.key(0), 3)
    layers, inner, hidden = 2, 12 * 8, 24
    return {
        "gate": jax.random.normal(keys[0], (layers, inner, hidden)) * hidden**-0.5,
        "up": jax.random.normal(keys[1], (layers, inner, hidden)) * hidden**-0.5,
        "down": jax.random.normal(keys[2], (layers, hidden, inner)) * inner**-0.5,
    }


def test_all_experts_are_the_dense_block(mlp):
    order = jax.vmap(lambda key: jax.random.permutation(key, 96))(
        jax.random.split(jax.random.key(1), 2)
    )
    experts = demo.split_into_experts(mlp, order)
    assert experts["w13"].shape == (2, 12, 16, 24) and experts["w2"].shape == (2, 12, 24, 8)
    x = jax.random.normal(jax.random.key(2), (17, 24))
    for layer in range(2):
        one = {name: a[layer] for name, a in mlp.items()}
        w13, w2 = experts["w13"][layer], experts["w2"][layer]
        gate, up = jnp.split(jnp.einsum("th,enh->etn", x, w13), 2, axis=-1)
        outputs = jnp.einsum("eti,ehi->eth", jax.nn.silu(gate) * up, w2)
        dense, _ = smollm.dense_mlp(x, one)
        np.testing.assert_allclose(outputs.sum(0), dense, atol=1e-5)
        norms = demo.expert_norms(x, {"w13": w13, "w2": w2})
        np.testing.assert_allclose(norms, jnp.linalg.norm(outputs, axis=-1).T, rtol=1e-5)

        model = SimpleNamespace(hidden_size=24, intermediate_size=96)
        cfg = demo.layer_config(model, "bf16", demo.NUM_EXPERTS, "xla")
        raw = {"gate_weight": jnp.zeros((12, 24)), "w13": w13, "w2": w2}
        params = {"moe": dg.prepare_params(raw, cfg), "dense": one}
        assert demo.dense_and_error(x, params, cfg)[1] < demo.BF16_TOLERANCE


def test_a_linear_router_is_recovered_and_obeyed(mlp):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(2, 12, 24)), rng.normal(size=(2, 12))
    x = rng.normal(size=(2, 100, 24))
    a = np.concatenate([x, np.ones((2, 100, 1))], axis=2)
    b = x @ weight.swapaxes(1, 2) + bias[:, None]
    router = demo.fit_routers(a.swapaxes(1, 2) @ a, a.swapaxes(1, 2) @ b, ridge=1e-9)
    np.testing.assert_allclose(router["weight"], weight, atol=1e-5)
    np.testing.assert_allclose(router["bias"], bias, atol=1e-5)

    # Only expert 7 is chosen: the layer is that expert's channels.
    one = {name: a[0] for name, a in mlp.items()}
    experts = demo.split_into_experts(mlp, jnp.tile(jnp.arange(96), (2, 1)))
    cfg = demo.layer_config(SimpleNamespace(hidden_size=24, intermediate_size=96), "bf16", 1, "xla")
    raw = {"gate_weight": jnp.zeros((12, 24)), **{n: a[0] for n, a in experts.items()}}
    router = {"weight": jnp.zeros((12, 24)), "bias": jax.nn.one_hot(7, 12)}
    params = {"moe": dg.prepare_params(raw, cfg), "router": router}
    y, _ = demo.sparse_mlp(jnp.asarray(x[0], jnp.float32), params, cfg)
    cut = slice(7 * 8, 8 * 8)
    seventh = {"gate": one["gate"][cut], "up": one["up"][cut], "down": one["down"][:, cut]}
    expected, _ = smollm.dense_mlp(jnp.asarray(x[0], jnp.float32), seventh)
    assert jnp.linalg.norm(y - expected) < 0.01 * jnp.linalg.norm(expected)


@pytest.mark.parametrize(
    "recipe, low, high",
    [("bf16", 0, 0.006), ("fp8_block", 0.03, 0.08), ("mxfp8", 0.03, 0.08), ("mxfp4", 0.1, 0.3)],
)
def test_the_demo_runs_every_recipe_and_sees_what_it_costs(mlp, recipe, low, high):
    assert set(demo.STYLES) == set(dg.recipes.RECIPES)
    experts = demo.split_into_experts(mlp, jnp.tile(jnp.arange(96), (2, 1)))
    cfg = demo.layer_config(
        SimpleNamespace(hidden_size=24, intermediate_size=96), recipe, 12, "xla"
    )
    raw = {"gate_weight": jnp.zeros((2, 12, 24)), **experts}
    # Over the model's layers at once, as the demo does.
    moe = jax.vmap(partial(dg.prepare_params, cfg=cfg))(raw)
    params = jax.tree.map(lambda a: a[0], {"moe": moe, "dense": mlp})
    x = jax.random.normal(jax.random.key(2), (17, 24))
    assert low < float(demo.dense_and_error(x, params, cfg)[1]) < high


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
    windows = np.zeros((3, 10), np.int32)
    perplexity, speed = demo.measure(windows, lambda t: (len(t) - 1) * math.log(50), lambda: None)
    assert perplexity == pytest.approx(50) and speed > 0


def test_no_paragraph_is_in_the_text_twice():
    seen = []
    tokenizer = SimpleNamespace(
        encode=lambda text: seen.append(text) or SimpleNamespace(ids=list(range(1100)))
    )
    assert demo.text_windows(tokenizer).shape == (2, demo.WINDOW)
    paragraphs = seen[0].split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 1000
