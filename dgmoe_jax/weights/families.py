"""Where published models keep their MoE layers: names of tensors and keys of config.json, as data.

From the models' config.json and index files, `transformers`' modeling files and its table of
conversions. A new model is a new row of `FAMILIES`; a new way to name things a new `Names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dgmoe_jax.config import OAISwiGLU, RouterConfig, SiLU

LAYERS = ("model.layers.{layer}.", "layers.{layer}.")
"""What stands before a block's names; transformers writes DeepSeek-V4 with it, the hub without."""


@dataclass(frozen=True)
class Matrices:
    """Names, below the block, of gate [I, H], up [I, H] and down [H, I].

    gate, up, down: without ending; `{expert}` where every expert has tensors of its own.
    weight:         ending of the weight's name, and `scales` those that its scale may have.
    stacked:        all experts lie in one tensor, along its first axis.
    rows:           "halves" or "interleaved" where gate and up are rows of one tensor.
    transposed:     stored [K, N].
    cut:            a row's bytes lie in pieces of this many: [N, K / 2 / cut, cut].
    """

    gate: str
    up: str
    down: str
    weight: str = ".weight"
    scales: tuple[str, ...] = (".weight_scale_inv", ".weight_scale", ".scale")
    stacked: bool = False
    rows: str | None = None
    transposed: bool = False
    cut: int | None = None

    def name(self, part: int, expert: int, ending: str | None = None) -> str:
        """Of gate, up or down (0, 1, 2): the weight's name, or that with another ending."""
        stem = (self.gate, self.up, self.down)[part].format(expert=expert)
        return stem + (self.weight if ending is None else ending)


@dataclass(frozen=True)
class Names:
    """Names of one MoE block's tensors: `block` below the layer, all others below the block.

    bias is the correction bias of the choice, table the experts of each token id (hash selection).
    """

    block: str
    gate: str
    experts: Matrices
    bias: str | None = None
    table: str | None = None
    shared: Matrices | None = None
    shared_gate: str | None = None


def _projections(prefix: str) -> Matrices:
    return Matrices(*(f"{prefix}.{name}_proj" for name in ("gate", "up", "down")))


def _numbered(prefix: str) -> Matrices:
    return Matrices(*(f"{prefix}.w{number}" for number in (1, 3, 2)))


# As transformers holds all experts of a block in memory, and saves them if so asked.
FUSED = Matrices(
    *("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj"),
    weight="",
    scales=("_scale_inv",),
    stacked=True,
    rows="halves",
)
QWEN3 = Names("mlp.", "gate.weight", _projections("experts.{expert}"))
QWEN2 = replace(
    QWEN3, shared=_projections("shared_expert"), shared_gate="shared_expert_gate.weight"
)
DEEPSEEK = replace(
    QWEN3, bias="gate.e_score_correction_bias", shared=_projections("shared_experts")
)
DEEPSEEK_V4 = Names(
    "ffn.",
    "gate.weight",
    _numbered("experts.{expert}"),
    bias="gate.bias",
    table="gate.tid2eid",
    shared=_numbered("shared_experts"),
)
MIXTRAL = Names("block_sparse_moe.", "gate.weight", _numbered("experts.{expert}"))
MINIMAX = replace(MIXTRAL, bias="e_score_correction_bias")
GPT_OSS = Names(
    "mlp.",
    "router.weight",
    replace(FUSED, weight="_blocks", scales=("_scales",), rows="interleaved", cut=16),
)
GPT_OSS_BF16 = replace(
    GPT_OSS, experts=replace(FUSED, scales=(), rows="interleaved", transposed=True)
)

_TOP_K = {"top_k": "num_experts_per_tok"}
_QWEN = {**_TOP_K, "renormalize": "norm_topk_prob"}
_SCALED = {**_QWEN, "scaling_factor": "routed_scaling_factor", "scoring": "scoring_func"}
_GROUPED = {**_SCALED, "num_groups": "n_group", "top_groups": "topk_group"}

# Keys that some versions of a model's config.json leave out; the preset's value stands then.
OPTIONAL = ("scoring_func", "swiglu_alpha")

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` are read.

    names:        the ways its tensors are named; that of which most are there is taken.
    preset:       the router, and `router` its fields by the key of config.json that holds them.
    inner:        key of the experts' intermediate size.
    num_shared:   key of the number of shared experts, or `shared_inner` that of their width.
    activation:   its class, and its fields by key.
    """

    names: tuple[Names, ...]
    preset: Callable[..., RouterConfig]
    router: Mapping[str, str]
    inner: str = "moe_intermediate_size"
    num_shared: str | None = None
    shared_inner: str | None = None
    activation: type = SiLU
    activation_fields: Mapping[str, str] = field(default_factory=dict)


_DEEPSEEK_V3 = Family(
    (DEEPSEEK, replace(DEEPSEEK, experts=FUSED)),
    RouterConfig.deepseek_v3,
    _GROUPED,
    num_shared="n_shared_experts",
)
_QWEN3_MOE = Family((QWEN3, replace(QWEN3, experts=FUSED)), RouterConfig.qwen3_moe, _QWEN)

FAMILIES = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": replace(_DEEPSEEK_V3, preset=RouterConfig.kimi_k2),
    "glm4_moe": replace(_DEEPSEEK_V3, preset=RouterConfig.glm4_moe),
    "deepseek_v4": Family(
        (DEEPSEEK_V4, replace(DEEPSEEK, table="gate.tid2eid", experts=FUSED)),
        RouterConfig.deepseek_v4,
        _SCALED,
        num_shared="n_shared_experts",
        activation_fields={"limit": "swiglu_limit"},
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen2_moe": replace(
        _QWEN3_MOE,
        names=(QWEN2, replace(QWEN2, experts=FUSED)),
        shared_inner="shared_expert_intermediate_size",
    ),
    "mixtral": Family(
        (MIXTRAL, replace(MIXTRAL, block="mlp.", experts=FUSED)),
        RouterConfig.mixtral,
        _TOP_K,
        inner="intermediate_size",
    ),
    "minimax_m2": Family(
        (MINIMAX, replace(MINIMAX, block="mlp.", experts=FUSED)),
        RouterConfig.minimax_m2,
        _TOP_K,
        inner="intermediate_size",
    ),
    "gpt_oss": Family(
        (GPT_OSS, GPT_OSS_BF16),
        RouterConfig.gpt_oss,
        _TOP_K,
        inner="intermediate_size",
        activation=OAISwiGLU,
        activation_fields={"alpha": "swiglu_alpha", "limit": "swiglu_limit"},
    ),
}

# Values that change what a layer computes, and those of them that it can compute here.
KNOWN = {
    "hidden_act": ("silu", "swish"),
    "topk_method": ("noaux_tc",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0, None),
}


def _at(value: Any, layer: int, absent: Any) -> Any:
    """Entry `layer` of a list; a layer past its end is a predictor of further tokens."""
    return value[layer] if layer < len(value) else absent


# Key of config.json -> whether (layer, value) makes the layer dense.
DENSE: Mapping[str, Callable[[int, Any], bool]] = {
    "first_k_dense_replace": lambda layer, first: layer < first,
    "moe_layer_freq": lambda layer, every: (
        not _at(every, layer, 1) if isinstance(every, list) else layer % every != 0
    ),
    "decoder_sparse_step": lambda layer, step: (layer + 1) % step != 0,
    "mlp_only_layers": lambda layer, dense: layer in dense,
    "mlp_layer_types": lambda layer, kinds: _at(kinds, layer, "moe") == "dense",
}

# Key of config.json -> whether (layer, value) makes the layer choose by a table of token ids.
HASHED: Mapping[str, Callable[[int, Any], bool]] = {
    "num_hash_layers": lambda layer, first: layer < first,
    "mlp_layer_types": lambda layer, kinds: _at(kinds, layer, "moe") == "hash_moe",
}
