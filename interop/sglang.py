"""SGLang's own DeepGEMM MoE runner, called from its wheel without its server.

Wants the wheels sglang, orjson, pybase64, msgspec, starlette and pyzmq beside torch, triton, nvcc
and sgl-deep-gemm. `layer` is what a served model runs for a standard (one GPU) dispatch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

LAYOUTS = {"masked": "masked", "contiguous": "compact"}
"""Our layouts -> SGLang's names of them."""

ALIGNMENT = 128  # of its contiguous rows: DeepGEMM's default, which other users of it may change


def _stand_in(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


@functools.cache
def _runner() -> ModuleType:
    """Its runner's module, with stand-ins for what only a server needs."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        raise ModuleNotFoundError("no sglang wheel")
    # Its __init__ imports the server and its clients.
    _stand_in("sglang", __path__=list(spec.submodule_search_locations))
    # Its warm-up of DeepGEMM's kernels at a server's start; they compile on first use without.
    _stand_in(
        "sglang.srt.layers.deep_gemm_wrapper.compile_utils",
        deep_gemm_execution_hook=lambda *args: contextlib.nullcontext(),
        DeepGemmKernelType=type("AnyKernel", (), {"__getattr__": lambda self, name: name})(),
    )
    # Imports every other dispatcher (DeepEP, Mooncake, ...) for the sake of this tuple.
    dispatcher = "sglang.srt.layers.moe.token_dispatcher"
    output = namedtuple("StandardCombineInput", ["hidden_states"])
    _stand_in(dispatcher, __path__=[])
    _stand_in(dispatcher + ".standard", StandardCombineInput=output)
    runner = importlib.import_module("sglang.srt.layers.moe.moe_runner.deep_gemm")
    # What a server's start would have set: no second GPU, default (not deterministic) mode.
    one_gpu = SimpleNamespace(tp_group=None)
    default = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    runner.get_parallel = lambda: one_gpu
    runner.get_exec = lambda: default
    runner.use_symmetric_memory = lambda *args, **kwargs: contextlib.nullcontext()
    return runner


@functools.cache
def unavailable() -> str | None:
    """Why it cannot run here, or None. Imports it and compiles its CUDA kernels the first time."""
    try:
        _compile()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


def _compile() -> None:
    # All at once: nvcc takes some 20 s for each.
    import torch

    _runner()
    from sglang.kernels.ops.activation.activation import silu_and_mul
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant

    rows = torch.ones((1, 128, 1024), device="cuda", dtype=torch.bfloat16)
    count = torch.ones(1, device="cuda", dtype=torch.int32)
    masked = dict(fuse_silu_and_mul=True, masked_m=count, column_major_scales=True)
    compile_each = (
        lambda: silu_and_mul(rows[0], rows.new_empty(128, 512)),
        lambda: sglang_per_token_group_quant_fp8(rows[0], 128),
        lambda: per_token_group_quant(rows, **masked),
    )
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda call: call(), compile_each))
    torch.cuda.synchronize()


def layer(w13: tuple, w2: tuple, x: Any, top_k: int, layout: str) -> Callable:
    """(x, topk_ids, topk_weights) -> y by SGLang's runner in one `layout`, all torch tensors.

    w13 and w2 are (values, scales), in BF16 with scales None; `x` is one of the inputs to come.
    It holds until the next call of `layer`: what chooses the layout is global to the process.
    Raises MemoryError where SGLang's own rule would not use the masked layout.
    """
    import deep_gemm
    import torch

    runner = _runner()
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    num_experts, hidden, inner = w2[0].shape
    config = MoeRunnerConfig(
        num_experts=num_experts,
        num_local_experts=num_experts,
        hidden_size=hidden,
        intermediate_size_per_partition=inner,
        top_k=top_k,
        params_dtype=torch.bfloat16,
        inplace=False,
    )
    fp8 = w13[1] is not None
    quant = runner.DeepGemmMoeQuantInfo(
        w13_weight=w13[0],
        w2_weight=w2[0],
        use_fp8=fp8,
        w13_scale=w13[1],
        w2_scale=w2[1],
        block_shape=[128, 128] if fp8 else None,
    )
    if layout == "masked":
        need = runner._estimate_masked_standard_layout_peak_bytes(config, quant, x)
        fraction = runner.envs.SGLANG_DEEPGEMM_MASKED_MEMORY_BUDGET_FRACTION.get()
        budget = int(fraction * torch.cuda.mem_get_info()[0])
        if need > budget:
            raise MemoryError(f"by SGLang's rule: {need} bytes, {budget} allowed")
    runner.envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.set(LAYOUTS[layout])
    deep_gemm.set_mk_alignment_for_contiguous_layout(ALIGNMENT)
    core = runner.DeepGemmRunnerCore(config)

    def call(x, topk_ids, topk_weights):
        state = {}
        dispatched = SimpleNamespace(hidden_states=x, topk_output=(topk_weights, topk_ids, None))
        rows = runner.pre_permute_standard_to_deep_gemm(dispatched, quant, config, state)
        out = core.run(rows, quant, state)
        return runner.post_permute_deep_gemm_to_standard(out, quant, config, state).hidden_states

    return call


def combine(rows: Any, ids: Any, weights: Any, scaling_factor: float) -> Any:
    """SGLang's combine: rows [T, k, H] bf16, ids and weights [T, k] -> [T, H] bf16."""
    import torch
    from sglang.kernels.ops.moe.ep_moe_kernels import post_reorder_deepgemm

    num_tokens, top_k, hidden = rows.shape
    out = rows.new_empty(num_tokens, hidden)
    src2dst = torch.arange(ids.numel(), dtype=torch.int32, device=rows.device).view(ids.shape)
    given = (rows.reshape(-1, hidden), out, src2dst, ids, weights.float())
    post_reorder_deepgemm(*given, top_k, num_tokens, hidden, scaling_factor)
    return out


def grouped_gemm(values: Any, scales: Any, weights: tuple, *, ids: Any, layout: str) -> Any:
    """DeepGEMM called from torch: values [T, k, K] FP8 with scales [T, k, K / 128], weights
    ([E, N, K], [E, N / 128, K / 128]), ids [T, k] -> [T, k, N] bf16."""
    import deep_gemm
    import torch

    num_experts, width = weights[0].shape[:2]
    owner = ids.flatten().long()
    counts = torch.bincount(owner, minlength=num_experts)
    # Rows of an expert are dense from the start of its segment, which is a whole number of blocks.
    blocks = -(-counts // ALIGNMENT)
    if layout == "masked":
        blocks = blocks.max().clamp(min=1).expand(num_experts)
    starts = (blocks.cumsum(0) - blocks) * ALIGNMENT
    order = owner.argsort(stable=True)
    rank = torch.empty_like(owner)
    rank[order] = (
        torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
    )
    row = starts[owner] + rank
    total = int(blocks.sum()) * ALIGNMENT
    a = values.new_zeros(total, values.shape[-1], dtype=torch.uint8)
    a[row] = values.flatten(0, 1).view(torch.uint8)
    a = a.view(values.dtype)
    groups = scales.new_ones(total, scales.shape[-1])
    groups[row] = scales.flatten(0, 1)
    out = torch.empty(total, width, dtype=torch.bfloat16, device=a.device)
    if layout == "masked":
        slabs = lambda t: t.view(num_experts, -1, t.shape[-1])  # noqa: E731
        # MN-major: what DeepGEMM reads is the transposed view.
        mn_major = slabs(groups).transpose(1, 2).contiguous().transpose(1, 2)
        expected_m = -(-len(owner) // num_experts)
        who = counts.to(torch.int32)
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
            (slabs(a), mn_major), weights, slabs(out), who, expected_m
        )
    else:
        who = torch.full((total,), -1, dtype=torch.int32, device=a.device)
        who[row] = owner.to(torch.int32)
        deep_gemm.set_mk_alignment_for_contiguous_layout(ALIGNMENT)
        mn_major = groups.t().contiguous().t()
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous((a, mn_major), weights, out, who)
    return out[row].unflatten(0, ids.shape)
