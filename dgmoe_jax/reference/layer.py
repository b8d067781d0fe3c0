"""The layer's definition in float64 numpy: dense per token, no permutation, no quantised path."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

F64 = np.float64


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def route(
    logits: np.ndarray,
    bias: np.ndarray | None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    token_ids: np.ndarray | None = None,
    hash_table: np.ndarray | None = None,
    valid: np.ndarray | None = None,
    expert_map: np.ndarray | None = None,
    fused_shared_experts: int = 0,
    shared_weight: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E] -> topk_ids [T, k], topk_weights [T, k], a row and a slot at a time.

    Scores are taken in f32 (what decides ties in the layer), sums of weights in f64. Ids by
    `hash_table` [vocab, k] if there is one; then n fused shared experts E..E+n-1; then -1 where
    `valid` [T] is False; then `expert_map` [C, E + n], whose copies take turns by token.
    """
    num_tokens, num_experts = logits.shape
    slots = top_k + fused_shared_experts
    ids = np.full((num_tokens, slots), -1, np.int32)
    weights = np.zeros((num_tokens, slots), np.float32)
    for t in range(num_tokens):
        if valid is not None and not valid[t]:
            continue
        row = np.where(np.isnan(logits[t]), -np.inf, logits[t]).astype(F64)
        row = np.minimum(row, np.finfo(np.float32).max)
        score = _scores(row, scoring).astype(np.float32)
        if hash_table is not None:
            known = 0 <= token_ids[t] < len(hash_table)
            chosen = [int(e) for e in hash_table[token_ids[t]]] if known else [-1] * top_k
        else:
            chosen = _chosen(score, bias, top_k, num_groups, top_groups)
        legal = [0 <= e < num_experts for e in chosen]
        picked = np.array([score[e] if ok else 0.0 for e, ok in zip(chosen, legal, strict=True)])
        if scoring == "softmax_topk":
            picked = np.zeros(top_k)
            picked[legal] = _scores(score[np.array(chosen)[legal]].astype(F64), "softmax")
        elif renormalize:
            picked = picked.astype(F64) / (picked.astype(F64).sum() + 1e-20)
        chosen = [e if ok else -1 for e, ok in zip(chosen, legal, strict=True)]
        chosen += range(num_experts, num_experts + fused_shared_experts)
        picked = [*picked, *[shared_weight] * fused_shared_experts]
        for slot, (e, weight) in enumerate(zip(chosen, picked, strict=True)):
            if e >= 0 and expert_map is not None:
                e = expert_map[t % len(expert_map)][e]
            if e >= 0:
                ids[t, slot], weights[t, slot] = e, weight
    return ids, weights


def _scores(row: np.ndarray, scoring: str) -> np.ndarray:
    if scoring == "softmax_topk":
        return row
    if scoring == "softmax":
        none = row.size == 0 or not np.isfinite(row.max())
        e = np.zeros_like(row) if none else np.exp(row - row.max())
        return e / e.sum() if e.sum() > 0 else e
    return _sigmoid(row) if scoring == "sigmoid" else np.sqrt(np.logaddexp(0.0, row))


def _chosen(
    score: np.ndarray, bias: np.ndarray | None, top_k: int, num_groups: int, top_groups: int
) -> list[int]:
    size = len(score) // num_groups
    key = score if bias is None else score + bias.astype(np.float32)
    group_score = []
    for g in range(num_groups):
        best = sorted(key[g * size : (g + 1) * size], reverse=True)
        with np.errstate(over="ignore"):
            group_score.append(sum(best[:2]) if bias is not None else best[0])
    groups = sorted(range(num_groups), key=lambda g: (-group_score[g], g))[:top_groups]
    allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
    return sorted(allowed, key=lambda e: (-key[e], e))[:top_k]


def activate(gate: np.ndarray, up: np.ndarray, kind: str, params: tuple) -> np.ndarray:
    """The gated activation in float64."""
    gate, up = gate.astype(F64), up.astype(F64)
    if kind == "silu":
        (limit,) = params
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * _sigmoid(gate) * up
    if kind == "oai_swiglu":
        alpha, limit = params
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * _sigmoid(alpha * gate) * (up + 1.0)
    beta, linear_beta = params
    return beta * np.tanh(gate / beta) * _sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)


def encode_fp8(
    x: np.ndarray, group: int = 128, ue8m0: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """x [..., K] -> e4m3 values and f32 scales [..., K / group], a group at a time, f32 rules.

    `ue8m0`: scales rounded up to powers of two, exponent field 1..254.
    """
    rows = x.astype(np.float32).reshape(-1, x.shape[-1])
    values = np.zeros(rows.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((rows.shape[0], rows.shape[1] // group), np.float32)
    for r, row in enumerate(rows):
        for g in range(scales.shape[1]):
            part = row[g * group : (g + 1) * group]
            scale = np.float32(max(np.abs(part).max(), np.float32(1e-10))) / np.float32(448)
            if ue8m0:
                mantissa, exponent = np.frexp(F64(scale))  # mantissa in [0.5, 1)
                scale = np.float32(2.0 ** np.clip(exponent - (mantissa == 0.5), -126, 127))
            scales[r, g] = scale
            values[r, g * group : (g + 1) * group] = np.clip(part / scale, -448, 448)
    return values.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)


def decode_fp8(values: np.ndarray, scales: np.ndarray, group: int = 128) -> np.ndarray:
    """values [..., K] with scales [..., K / group] -> float64."""
    return values.astype(F64) * np.repeat(scales.astype(F64), group, axis=-1)


def moe(
    x: np.ndarray,
    w13: np.ndarray,
    w2: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    *,
    kind: str = "silu",
    params: tuple = (None,),
    scaling_factor: float = 1.0,
    shared_w13: np.ndarray | None = None,
    shared_w2: np.ndarray | None = None,
    between: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    gemm_out: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """x [T, H], w13 [E, 2I, H], w2 [E, H, I] -> [T, H] float64.

    `between` is applied to the input of each GEMM and `gemm_out` to the output of each (identity:
    the exact layer; a quantiser and a rounding: the layer on its own operands).
    """
    x = between(x.astype(F64))
    y = np.zeros((x.shape[0], w2.shape[1]), F64)

    def block(rows: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
        gateup = gemm_out(rows @ up_proj.astype(F64).T)
        gate, up = np.split(gateup, 2, axis=1)
        return gemm_out(between(activate(gate, up, kind, params)) @ down_proj.astype(F64).T)

    for e in np.unique(topk_ids[topk_ids >= 0]):
        tokens, slots = np.nonzero(topk_ids == e)
        out = block(x[tokens], w13[e], w2[e])
        np.add.at(y, tokens, topk_weights[tokens, slots].astype(F64)[:, None] * out)
    y *= scaling_factor
    if shared_w13 is not None:
        y += block(x, shared_w13, shared_w2)
    return y
