"""The layer against others' code, step by step: `python -m dgmoe_jax parity --model deepseek_v3`.

One MoE block of a model, with random weights, is run by this package and by

transformers  its own block, in f32 on the same tokens and the same weights, dequantised: a chain
              of its own, whose steps are seen as the products that it asks torch for;
torch         a few lines of plain torch, each step in f64 on *our* result of the step before, so
              that a difference shows where it arises;
sglang        SGLang's quantising and activation kernels and DeepGEMM, each on our bytes, and its
              whole flow. On a GPU, for "fp8_block".

Every step is compared in (token, slot) order, whatever the layout; slots are ordered by expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from dgmoe_jax.interop import dlpack, sglang
from dgmoe_jax.interop.torch_moe import TorchMoE
from torch.overrides import TorchFunctionMode

import dgmoe_jax as dg
from dgmoe_jax import backends, doctor
from dgmoe_jax.plan import Plan, dense
from dgmoe_jax.recipes import padded, run_of
from dgmoe_jax.steps import experts, permute
from dgmoe_jax.steps import route as routing_step

MODELS = {
    "deepseek_v3": "DeepseekV3MoE",
    "deepseek_v32": "DeepseekV32MoE",
    "deepseek_v4": "DeepseekV4SparseMoeBlock",
    "deepseek_v4_hash": "DeepseekV4SparseMoeBlock",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "mixtral": "MixtralSparseMoeBlock",
    "glm4_moe": "Glm4MoeMoE",
    "minimax_m2": "MiniMaxM2SparseMoeBlock",
}
"""model_type -> its block's class in transformers; `_hash` is the one that looks ids up."""

AGAINST = ("transformers", "torch", "sglang")

OWN_CHAIN = {"bf16": 0.0045, "fp8_block": 0.05}
"""Relative error of a step of transformers' f32 chain: bf16 is rounded to at most five times
(tests/test_parity_transformers.py); FP8 of the activations costs Gaussian numbers 4.6 %."""

ROUNDING = 2.0**-16
"""Of f32 numbers that an exponential went into: a GPU's own is within 2^-20 or so."""

ON_OUR_BYTES = 2.0**-9
"""Relative error of one step on the same input. Both round a sum to bf16, and differ where it lies
between two of them; an FP8 value falls on its neighbour where an exponential is an ulp off."""

SGLANG_BYTES, SGLANG_COMBINE, SGLANG_FLOW = 2.0**-8, 2.0**-8, 2.0**-5
"""Relative errors beside SGLang's quantisation, its combine on our rows (an ulp of bf16), and its
whole flow. nvcc's --use_fast_math makes its scales amax times a rounded 1 / 448, up to an ulp from
ours, which are divided correctly, and one in a thousand FP8 values the neighbour of ours: 0.28 % of
the rows, measured on an H200, which by the second quantisation are 1.4 to 1.8 % of the result."""

VOCABULARY = 1000


@dataclass(frozen=True)
class Case:
    """A block of transformers and the same one here, and tokens for both."""

    block: torch.nn.Module
    layer: TorchMoE
    x: torch.Tensor  # [T, H] bf16
    token_ids: torch.Tensor | None  # [T] int32


@dataclass(frozen=True)
class Line:
    """One step, ours against another's.

    first: the first element that differs, "[token, slot, ...]: ours, theirs", or None.
    differing: the share of elements that do. error: in the Frobenius norm, relative to theirs.
    limit: what `error` may be; 0 asks for the same bits.
    """

    against: str
    stage: str
    first: str | None
    differing: float
    max_abs: float
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.first is None if self.limit == 0 else self.error <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def unavailable(
    name: str, recipe: str, *, layout: str = "auto", backend: str = "auto"
) -> str | None:
    """Why there is nothing to compare with under this name here, or None.

    Raises ValueError for a layout or backend that there is not.
    """
    if name not in AGAINST:
        return f"must be in {AGAINST}"
    recipes = ("fp8_block",) if name == "sglang" else tuple(OWN_CHAIN)
    if recipe not in recipes:
        return f"recipe={recipe!r}: must be in {recipes}"
    why_not = doctor.why_not(recipe, backend, layout)
    if why_not or name != "sglang":
        return why_not
    if jax.default_backend() != "gpu":
        return f"needs a GPU; JAX runs on {jax.default_backend()}"
    return sglang.unavailable()


@torch.no_grad()
def make_case(
    model: str,
    *,
    tokens: int,
    num_experts: int,
    hidden: int,
    inner: int,
    top_k: int,
    recipe: str,
    layout: str = "auto",
    backend: str = "auto",
    keep_fp32: bool = True,
    seed: int = 0,
) -> Case:
    """Gaussian weights that are bf16 numbers, and a correction bias that decides many choices.

    Raises ValueError for a model that is not in `MODELS`, or sizes that it cannot have.
    """
    import transformers

    if model not in MODELS:
        raise ValueError(f"model={model!r}: must be in {[*MODELS]}")
    kind = model.removesuffix("_hash")
    v4 = kind == "deepseek_v4"
    grouped = kind in ("deepseek_v3", "deepseek_v32") and num_experts % 4 == 0
    config = transformers.AutoConfig.for_model(
        kind,
        **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), num_experts),
        **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), inner),
        shared_expert_intermediate_size=inner,
        hidden_size=hidden,
        num_experts_per_tok=top_k,
        n_group=4 if grouped else 1,
        topk_group=2 if grouped else 1,
        vocab_size=VOCABULARY,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        num_hidden_layers=1,
        experts_implementation="eager",
        **({"mlp_layer_types": ["hash_moe" if model.endswith("_hash") else "moe"]} if v4 else {}),
    )
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    modeling = getattr(transformers.models, kind)
    block_class = getattr(getattr(modeling, f"modeling_{kind}"), MODELS[model])
    with torch.device(device):
        block = block_class(config, 0) if v4 else block_class(config)
    block = block.eval().float()
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in block.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        parameter.copy_(parameter.bfloat16())
    for name, buffer in block.named_buffers():
        if name.endswith("tid2eid"):
            ids = torch.rand(VOCABULARY, num_experts, device=device, generator=generator)
            buffer.copy_(ids.argsort(dim=1)[:, :top_k])
        elif name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2, generator=generator)
    layer = TorchMoE.from_hf(block, recipe=recipe, layout=layout, backend=backend)
    layer.cfg = replace(layer.cfg, activation=replace(layer.cfg.activation, keep_fp32=keep_fp32))
    _give_back(block, layer)
    x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()
    token_ids = None
    if layer.cfg.router.selection == "hash":
        like = dict(device=device, generator=generator, dtype=torch.int32)
        token_ids = torch.randint(0, VOCABULARY, (tokens,), **like)
    return Case(block, layer, x, token_ids)


def _give_back(block: torch.nn.Module, layer: TorchMoE) -> None:
    """The weights as the layer has them, quantised, so that both sides compute with the same."""
    cfg, params = layer.cfg, layer.params
    w13, w2 = _cut(params.experts, cfg.hidden_size, cfg.intermediate_size)
    block.experts.gate_up_proj.copy_(w13)
    block.experts.down_proj.copy_(w2)
    if params.shared is not None:
        shared = getattr(block, "shared_experts", None) or block.shared_expert
        inner = cfg.num_shared_experts * cfg.intermediate_size
        w13, w2 = _cut(params.shared, cfg.hidden_size, inner)
        shared.gate_proj.weight.copy_(w13[0, :inner])
        shared.up_proj.weight.copy_(w13[0, inner:])
        shared.down_proj.weight.copy_(w2[0])


def _cut(block: dg.ExpertWeights, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2I, H] and w2 [E, H, I] in f64, without padding."""
    w13 = _weights(block.w13).unflatten(1, (2, -1))[:, :, :inner, :hidden].flatten(1, 2)
    return w13, _weights(block.w2)[:, :hidden, :inner]


# --- Ours


@functools.partial(jax.jit, static_argnames=("cfg", "plan"))
def _steps(x, params, token_ids, *, cfg: dg.MoEConfig, plan: Plan) -> dict[str, Any]:
    """The layer's steps, one after another, and what each hands on."""
    fmt = run_of(cfg.recipe, params.experts.w13.format).operands.activations
    logits = routing_step.router_logits(x, params.gate_weight)
    routing = routing_step.select(
        *(logits, params.gate_bias, cfg.router, plan.backend),
        token_ids=token_ids,
        hash_table=params.hash_table,
    )
    wide = jnp.pad(x, ((0, 0), (0, padded(cfg.hidden_size) - cfg.hidden_size)))
    rows, src2dst = permute.permute(wide, routing.topk_ids, fmt, cfg.num_experts, plan)
    gateup = experts.gemm(rows, params.experts.w13, fmt, plan)
    inner = experts.activate(gateup, rows, cfg.activation, fmt, plan)
    down = experts.gemm(inner, params.experts.w2, fmt, plan)
    combine = functools.partial(
        backends.get("unpermute", plan.backend),
        *(down, src2dst, routing.topk_weights),
        scaling_factor=cfg.router.scaling_factor,
    )
    found = {"routed": combine(shared=None)[:, : cfg.hidden_size]}
    if params.shared is not None:
        alone = dense(plan, x.shape[0], cfg.recipe)
        every_row = permute.in_place(wide, fmt, alone)
        block = experts.experts(every_row, params.shared, cfg.activation, fmt, alone)
        shared = block[: x.shape[0], : cfg.hidden_size]
        if params.shared_gate_weight is not None:
            gate = jax.nn.sigmoid(routing_step.router_logits(x, params.shared_gate_weight))
            shared = (shared.astype(jnp.float32) * gate).astype(shared.dtype)
        found["shared"] = shared
    return found | {
        "ids": routing.topk_ids,
        "weights": routing.topk_weights,
        "src2dst": src2dst,
        "rows": (rows.values, rows.scales),
        "gateup": gateup,
        "inner": (inner.values, inner.scales),
        "down": down,
        "output": dg.moe_layer(x, params, cfg, token_ids=token_ids, plan=plan),
    }


def ours(case: Case) -> dict[str, torch.Tensor]:
    """Every stage by name, [T, k, ...], slots in order of their expert, padding cut off."""
    cfg, params = case.layer.cfg, case.layer.params
    distinct = None if cfg.router.selection == "scores" else False
    plan = dg.plan(cfg, len(case.x), distinct_ids=distinct)
    ids = None if case.token_ids is None else dlpack.to_jax(case.token_ids)
    found = _steps(dlpack.to_jax(case.x), params, ids, cfg=cfg, plan=plan)
    order = jnp.argsort(found["ids"], axis=1)
    ids, weights, where = (
        jnp.take_along_axis(found[name], order, axis=1) for name in ("ids", "weights", "src2dst")
    )

    def scales_of(scales):
        scales = scales.reshape(plan.slabs, -1, scales.shape[1])[:, :, : plan.rows // plan.slabs]
        return scales.transpose(0, 2, 1).reshape(plan.rows, -1)

    stages = {"router ids": ids, "router weights": weights}
    for stage, name, width in (
        ("rows", "rows", cfg.hidden_size),
        ("activation", "inner", cfg.intermediate_size),
    ):
        values, scales = found[name]
        stages[stage] = values[where][..., :width]
        if scales is not None:
            stages[f"{stage}: scales"] = scales_of(scales)[where]
    gate, up = jnp.split(found["gateup"][where], 2, axis=-1)
    inner = cfg.intermediate_size
    stages["gate and up"] = jnp.concatenate([gate[..., :inner], up[..., :inner]], axis=-1)
    stages["down"] = found["down"][where][..., : cfg.hidden_size]
    stages |= {name: found[name] for name in ("routed", "shared", "output") if name in found}
    return {name: dlpack.to_torch(value) for name, value in stages.items()}


# --- Theirs: functions of a case and our stages that yield (stage, their value, limit).

Stages = Iterator[tuple[str, torch.Tensor, float]]


class _Products(TorchFunctionMode):
    """Inputs and results of every `torch.nn.functional.linear`, in order."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            self.seen.append((args[0], result))
        return result


def _sorted(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.sort(dim=1, stable=True)
    return ids.to(torch.int32), weights.gather(1, order)


def by_transformers(case: Case, mine: dict[str, torch.Tensor]) -> Stages:
    cfg, limit = case.layer.cfg, OWN_CHAIN[case.layer.cfg.recipe]
    x, block = case.x.float(), case.block
    by_token = [] if case.token_ids is None else [case.token_ids.long()]
    bias = getattr(block, "e_score_correction_bias", None)  # MiniMax's block hands it in
    _, weights, ids = block.gate(x, *by_token, *([] if bias is None else [bias]))
    ids, weights = _sorted(ids, weights)
    yield "router ids", ids, 0.0
    # transformers has its scaling factor in the weights.
    yield "router weights", weights.float() / cfg.router.scaling_factor, ROUNDING
    yield "rows", x[:, None].expand(-1, ids.shape[1], -1), limit
    columns = []
    for slot in ids.long().split(1, dim=1):
        with _Products() as products:
            block.experts(x, slot, torch.ones_like(slot, dtype=torch.float32))
        column = None
        pairs = zip(products.seen[::2], products.seen[1::2], strict=True)
        for expert, ((_, gateup), (inner, down)) in zip(slot.unique(), pairs, strict=True):
            parts = (gateup, inner, down)
            column = column or [p.new_empty(len(x), p.shape[1]) for p in parts]
            for whole, part in zip(column, parts, strict=True):
                whole[(slot == expert).squeeze(1)] = part
        columns.append(column)
    names = ("gate and up", "activation", "down")
    for stage, *parts in zip(names, *columns, strict=True):
        yield stage, torch.stack(parts, dim=1), limit
    want = block(x[None], *(i[None] for i in by_token))[0]
    yield "output", want, limit


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and f32 scales of groups of 128, the last one maybe short."""
    tail = -x.shape[-1] % 128
    groups = torch.nn.functional.pad(x.float(), (0, tail)).unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1).clamp(min=1e-10)
    # By a tensor: on a GPU, torch multiplies by the reciprocal of a number.
    scales = largest / torch.full_like(largest, 448.0)
    values = (groups / scales[..., None]).clamp(-448.0, 448.0).flatten(-2)
    return values[..., : x.shape[-1]].to(torch.float8_e4m3fn), scales


def _decode(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    values = values.double()
    if scales is None:
        return values
    return values * scales.double().repeat_interleave(128, -1)[..., : values.shape[-1]]


def _weights(scaled: dg.Scaled) -> torch.Tensor:
    """[E, N, K] f64, as they are padded."""
    scales = scaled.scales
    if scales is not None:
        scales = dlpack.to_torch(scales).repeat_interleave(128, -2)
    return _decode(dlpack.to_torch(scaled.values), scales)


def _activate(gateup: torch.Tensor, activation: dg.config.Activation) -> torch.Tensor:
    kind, (limit, *_) = activation.params()
    if kind != "silu":
        raise NotImplementedError(f"activation {activation}: 'silu' is compared")
    gate, up = gateup.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    product = torch.nn.functional.silu(gate) * up
    return product if activation.keep_fp32 else product.bfloat16()


def _expert(
    rows: torch.Tensor, block: dg.ExpertWeights, cfg: dg.MoEConfig, inner: int
) -> torch.Tensor:
    """Rows [M, H] f64 -> what the only expert of `block` makes of them, bf16."""
    w13, w2 = _cut(block, cfg.hidden_size, inner)
    kept = _activate((rows @ w13[0].T).bfloat16(), cfg.activation)
    kept = _decode(*_quantise(kept)) if cfg.recipe == "fp8_block" else kept.bfloat16().double()
    return (kept @ w2[0].T).bfloat16()


def by_torch(case: Case, mine: dict[str, torch.Tensor]) -> Stages:
    cfg, params, x = case.layer.cfg, case.layer.params, case.x
    fp8, router = cfg.recipe == "fp8_block", cfg.router
    hidden, inner = cfg.hidden_size, cfg.intermediate_size
    ids, weights = _choose(case)
    yield "router ids", ids, 0.0
    yield "router weights", weights, ROUNDING

    top_k = ids.shape[1]
    slots = lambda a: a[:, None].expand(-1, top_k, *a.shape[1:])  # noqa: E731
    values, scales = _quantise(x) if fp8 else (x, None)
    yield "rows", slots(values), 0.0
    if fp8:
        yield "rows: scales", slots(scales), 0.0

    def products(stage, weight, width):
        rows = _decode(mine[stage], mine.get(f"{stage}: scales"))
        out = rows.new_empty(*rows.shape[:2], width)
        for expert in mine["router ids"].unique():
            chosen = mine["router ids"] == expert
            out[chosen] = rows[chosen] @ weight[expert].T
        return out.bfloat16()

    w13, w2 = _cut(params.experts, hidden, inner)
    yield "gate and up", products("rows", w13, 2 * inner), ON_OUR_BYTES
    kept = _activate(mine["gate and up"], cfg.activation)
    values, scales = _quantise(kept) if fp8 else (kept.bfloat16(), None)
    if fp8:
        # As numbers, since an exponential decides the last bit of a scale.
        yield "activation: scales", scales, ROUNDING
        yield "activation", _decode(values, scales), ON_OUR_BYTES
    else:
        yield "activation", values, ON_OUR_BYTES
    yield "down", products("activation", w2, hidden), ON_OUR_BYTES
    total = (mine["down"].double() * mine["router weights"].double()[..., None]).sum(1)
    total = total * router.scaling_factor
    yield "routed", total.bfloat16(), ON_OUR_BYTES
    if params.shared is not None:
        rows = _decode(*_quantise(x)) if fp8 else x.double()
        shared = _expert(rows, params.shared, cfg, cfg.num_shared_experts * inner)
        if params.shared_gate_weight is not None:
            gate = dlpack.to_torch(params.shared_gate_weight).float()
            shared = (shared.float() * (x.float() @ gate.T).sigmoid()).bfloat16()
        # Its own chain: FP8 values that fall on a neighbour add up over the intermediate size.
        yield "shared", shared, 4 * ON_OUR_BYTES if fp8 else ON_OUR_BYTES
        total = total + mine["shared"].double()
    yield "output", total.bfloat16(), ON_OUR_BYTES


def _choose(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    params, router = case.layer.params, case.layer.cfg.router
    logits = case.x.float() @ dlpack.to_torch(params.gate_weight).float().T
    scores = {
        "softmax": lambda x: x.softmax(-1),
        "softmax_topk": lambda x: x,
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }[router.scoring](logits)
    if router.selection == "hash":
        ids = dlpack.to_torch(params.hash_table)[case.token_ids.long()].long()
    else:
        biased = params.gate_bias is not None
        key = scores + dlpack.to_torch(params.gate_bias) if biased else scores
        if router.num_groups > 1:
            groups = key.unflatten(1, (router.num_groups, -1))
            best = groups.topk(2 if biased else 1, dim=2).values.sum(2)
            lost = torch.ones_like(best, dtype=torch.bool)
            lost.scatter_(1, best.topk(router.top_groups, dim=1).indices, False)
            key = groups.masked_fill(lost[..., None], -torch.inf).flatten(1)
        ids = key.topk(router.top_k, dim=1).indices
    weights = scores.gather(1, ids)
    if router.scoring == "softmax_topk":
        weights = weights.softmax(1)
    elif router.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return _sorted(ids, weights)


def by_sglang(case: Case, mine: dict[str, torch.Tensor]) -> Stages:
    """Its kernels on our bytes. Its contiguous flow rounds the activation to bf16 before it
    quantises, which `keep_fp32=False` is here."""
    from sglang.kernels.ops.activation.activation import silu_and_mul
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    cfg, params, x = case.layer.cfg, case.layer.params, case.x
    for name, size in (("hidden", cfg.hidden_size), ("intermediate", cfg.intermediate_size)):
        if size % 128:
            raise ValueError(f"{name}={size}: must be a multiple of 128 for SGLang's kernels")
    if cfg.activation != dg.SiLU(keep_fp32=False):
        raise NotImplementedError(f"{cfg.activation}: SiLU(keep_fp32=False) is compared")
    ids, layout = mine["router ids"], dg.plan(cfg, len(case.x)).layout
    top_k = ids.shape[1]
    both = [
        (dlpack.to_torch(w.values), dlpack.to_torch(w.scales))
        for w in (params.experts.w13, params.experts.w2)
    ]
    slots = lambda a: a[:, None].expand(-1, top_k, *a.shape[1:])  # noqa: E731
    values, scales = sglang_per_token_group_quant_fp8(x, 128)
    yield "rows", slots(_decode(values, scales)), SGLANG_BYTES
    yield "rows: scales", slots(scales), ROUNDING
    product = functools.partial(sglang.grouped_gemm, ids=ids, layout=layout)
    yield "gate and up", product(mine["rows"], mine["rows: scales"], both[0]), 0.0
    gateup = mine["gate and up"].flatten(0, 1)
    kept = gateup.new_empty(len(gateup), gateup.shape[1] // 2)
    silu_and_mul(gateup, kept)
    values, scales = sglang_per_token_group_quant_fp8(kept, 128)
    # As numbers, since SGLang divides with nvcc's fast arithmetic.
    kept = _decode(values, scales).unflatten(0, (-1, top_k))
    yield "activation: scales", scales.unflatten(0, (-1, top_k)), ON_OUR_BYTES
    yield "activation", kept, SGLANG_BYTES
    yield "down", product(mine["activation"], mine["activation: scales"], both[1]), 0.0
    weights = mine["router weights"]
    combined = sglang.combine(mine["down"], ids, weights, cfg.router.scaling_factor)
    yield "routed", combined, SGLANG_COMBINE
    whole = sglang.layer(*both, x, top_k, layout)
    mine["whole flow"] = mine["routed"]
    yield "whole flow", whole(x.clone(), ids, weights * cfg.router.scaling_factor), SGLANG_FLOW


_BY: dict[str, Callable[[Case, dict[str, torch.Tensor]], Stages]] = {
    "transformers": by_transformers,
    "torch": by_torch,
    "sglang": by_sglang,
}


@torch.no_grad()
def compare(case: Case, against: str) -> list[Line]:
    """A line for each stage that the other side has, in the order of computation."""
    mine = ours(case)
    return [
        compare_stage(against, stage, _like(mine, stage, theirs), theirs, limit)
        for stage, theirs, limit in _BY[against](case, mine)
    ]


def _like(mine: dict[str, torch.Tensor], stage: str, theirs: torch.Tensor) -> torch.Tensor:
    """Our stage in the encoding of theirs: bytes beside bytes, numbers beside numbers."""
    scales = mine.get(f"{stage}: scales")
    encoded = scales is not None and theirs.dtype != mine[stage].dtype
    return _decode(mine[stage], scales) if encoded else mine[stage]


def compare_stage(
    against: str, stage: str, mine: torch.Tensor, theirs: torch.Tensor, limit: float
) -> Line:
    """NaN differs from everything. Raises ValueError for values of different shapes."""
    if mine.shape != theirs.shape:
        raise ValueError(f"{stage}: shape {tuple(mine.shape)}, {tuple(theirs.shape)} by {against}")
    got, want = mine.double(), theirs.double()
    differs = (got != want).nonzero()
    first = None
    if len(differs):
        at = tuple(differs[0].tolist())
        first = f"{[*at]}: {got[at].item():.6g}, {want[at].item():.6g}"
    gap = (got - want).abs()
    norm = want.norm().item()
    error = gap.norm().item() / norm if norm else float(bool(len(differs)))
    share = len(differs) / max(1, got.numel())
    largest = gap.max().item() if gap.numel() else 0.0
    # A NaN is no number to be small: it fails whatever the limit is.
    error = error if np.isfinite(error) else float("inf")
    return Line(against, stage, first, share, largest, error, limit)
