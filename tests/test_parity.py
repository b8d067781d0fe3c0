"""The parity harness: its models pass, and each of its comparisons can fail."""

import dataclasses
import json
import sys
import types

import jax
import numpy as np
import pytest
import torch
from conftest import ON_GPU
from dgmoe_jax.interop import parity, sglang
from typer.testing import CliRunner

from dgmoe_jax.__main__ import app

DEVICE = "cuda" if ON_GPU else "cpu"
torch.set_num_threads(1)
SMALL = dict(tokens=33, num_experts=8, hidden=192, inner=96, top_k=3)
STAGES = [
    *("router ids", "router weights", "rows", "gate and up", "activation", "down", "routed"),
    "output",
]


def cli(*options):
    return CliRunner().invoke(app, ["parity", *map(str, options)], env={"COLUMNS": "250"})


@pytest.mark.parametrize("number", range(len(parity.MODELS)), ids=list(parity.MODELS))
def test_every_model_agrees_with_transformers_and_plain_torch(number):
    model = list(parity.MODELS)[number]
    recipe = ("bf16", "fp8_block")[number % 2]
    layout = ("contiguous", "masked")[number // 2 % 2]
    case = parity.make_case(model, recipe=recipe, layout=layout, seed=number, **SMALL)
    lines = [line for side in ("transformers", "torch") for line in parity.compare(case, side)]
    assert [line for line in lines if not line.ok] == []
    of_torch = [line.stage for line in lines if line.against == "torch"]
    scales = [f"{stage}: scales" for stage in ("rows", "activation") if recipe == "fp8_block"]
    shared = ["shared"] if case.layer.params.shared is not None else []
    assert sorted(of_torch) == sorted(STAGES + scales + shared)
    # transformers quantises nothing, so an FP8 layer that agreed to the last bit would be no layer.
    (output,) = [x for x in lines if x.stage == "output" and x.against == "transformers"]
    assert output.error > (0.02 if recipe == "fp8_block" else 1e-4)


def spoil(case, what):
    """The same tokens for a layer that has one thing wrong."""
    layer, cfg = case.layer, case.layer.cfg
    router, params = cfg.router, layer.params
    twice = lambda s: dataclasses.replace(s, scales=s.scales * 2)  # noqa: E731
    if what == "scaling_factor":
        layer.cfg = dataclasses.replace(cfg, router=dataclasses.replace(router, scaling_factor=1.0))
    elif what == "renormalize":
        layer.cfg = dataclasses.replace(cfg, router=dataclasses.replace(router, renormalize=False))
    elif what == "limit":
        act = dataclasses.replace(cfg.activation, limit=0.1)
        layer.cfg = dataclasses.replace(cfg, activation=act)
    elif what == "bias":
        layer.params = dataclasses.replace(params, gate_bias=-params.gate_bias)
    else:
        block = {what: twice(getattr(params.experts, what))}
        block = dataclasses.replace(params.experts, **block)
        layer.params = dataclasses.replace(params, experts=block)


@pytest.mark.parametrize(
    "what, stage",
    [
        ("scaling_factor", "router weights"),
        ("renormalize", "router weights"),
        ("bias", "router ids"),
        ("w13", "gate and up"),
        ("limit", "activation"),
        ("w2", "down"),
    ],
)
def test_the_first_stage_that_fails_is_the_one_that_is_wrong(what, stage):
    case = parity.make_case("deepseek_v3", recipe="fp8_block", **SMALL)
    spoil(case, what)
    wrong = [line.stage for line in parity.compare(case, "transformers") if not line.ok]
    assert wrong and wrong[0] == stage and wrong[-1] == "output"


def test_one_byte_that_differs_is_found_in_every_stage(monkeypatch):
    case = parity.make_case("qwen2_moe", recipe="fp8_block", **SMALL)
    mine, original = parity.ours(case), parity.ours
    for stage, value in mine.items():
        if value.dtype == torch.int32:
            wrong = (value + 1) % 8
        else:
            wrong = (value.float() * 2).to(value.dtype)
        monkeypatch.setattr(parity, "ours", lambda case, s=stage, w=wrong: {**original(case), s: w})
        lines = parity.compare(case, "torch")
        assert not {line.stage: line for line in lines}[stage].ok, stage


def test_a_line_says_where_and_how_much():
    theirs = torch.ones(2, 3, dtype=torch.bfloat16)
    mine = theirs.clone()
    assert parity.compare_stage("a", "b", mine, theirs, 0.0).ok
    mine[1, 2] = 1.5
    line = parity.compare_stage("a", "b", mine, theirs, 0.0)
    assert not line.ok and line.first == "[1, 2]: 1.5, 1" and line.max_abs == 0.5
    assert line.differing == 1 / 6 and np.isclose(line.error, 0.5 / 6**0.5)
    assert parity.compare_stage("a", "b", mine, theirs, 0.3).ok
    mine[0, 0] = torch.nan
    line = parity.compare_stage("a", "b", mine, theirs, 0.3)
    assert not line.ok and line.first == "[0, 0]: nan, 1"
    both = torch.full((2,), torch.nan)
    assert not parity.compare_stage("a", "b", both, both, 1.0).ok
    with pytest.raises(ValueError, match="b: shape"):
        parity.compare_stage("a", "b", mine[0], theirs, 1.0)


def test_on_the_command_line():
    sizes = ("--tokens", 17, "--experts", 8, "--hidden", 128, "--intermediate", 64, "--top-k", 2)
    done = cli("--model", "glm4_moe", *sizes)
    assert done.exit_code == 0, done.output
    for text in ("transformers", "torch", "gate and up", "same bits", "ok"):
        assert text in done.output
    done = cli("--model", "mixtral", *sizes, "--against", "torch", "--json")
    lines = json.loads(done.stdout)
    assert done.exit_code == 0 and [line["stage"] for line in lines] == STAGES
    assert {line["against"] for line in lines} == {"torch"} and all(line["ok"] for line in lines)


def test_a_difference_is_exit_code_1_and_no_comparison_2(monkeypatch):
    sizes = ("--tokens", 5, "--experts", 4, "--hidden", 128, "--intermediate", 64, "--top-k", 2)
    monkeypatch.setattr(parity, "ON_OUR_BYTES", -1.0)
    assert cli("--model", "mixtral", *sizes, "--against", "torch").exit_code == 1
    for options, says in (
        (("--model", "mixtrall"), "model='mixtrall': must be in"),
        (("--model", "mixtral", "--against", "vllm"), "against='vllm': must be in"),
        (("--model", "mixtral", "--against", "sglang"), "recipe='bf16'"),
        (("--model", "mixtral", "--recipe", "fp4"), "recipe='fp4'"),
        (("--model", "mixtral", "--recipe", "mxfp8"), "recipe='mxfp8': must be in ('bf16', "),
        (
            ("--model", "mixtral", "--recipe", "mxfp4", "--against", "transformers"),
            "recipe='mxfp4': must be in ('bf16', ",
        ),
        (("--model", "mixtral", "--layout", "flat"), "layout='flat': must be in"),
        (("--model", "mixtral", "--tokens", 0), "--tokens"),
        (("--model", "mixtral", "--experts", -1), "--experts"),
        (("--model", "mixtral", "--hidden", 0), "--hidden"),
        (("--model", "mixtral", "--top-k", 9, "--experts", 8), "top_k=9"),
    ):
        done = cli(*options)
        assert done.exit_code == 2 and says in done.stderr, (says, done.output)


@pytest.mark.skipif(ON_GPU, reason="of what a CPU lacks")
def test_what_needs_a_gpu_is_refused_with_the_reason_on_a_cpu():
    for backend in ("pallas", "deep_gemm"):
        done = cli("--model", "mixtral", "--recipe", "fp8_block", "--backend", backend)
        assert done.exit_code == 2 and f"{backend!r} needs an NVIDIA GPU" in done.stderr
    done = cli("--model", "mixtral", "--recipe", "fp8_block", "--against", "sglang")
    assert done.exit_code == 2 and "needs a GPU" in done.stderr


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_rows_for_deep_gemm_lie_as_it_reads_them(layout, monkeypatch):
    """With a stand-in that multiplies what lies there: each row with its expert's weights."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.rand(70, 8, generator=rng).argsort(dim=1)[:, :3].to(torch.int32)
    ids[ids == 5] = 0  # nobody's expert, and one that two slots of a token name
    values = torch.randint(-8, 9, (70, 3, 256), generator=rng).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-1, 2, (70, 3, 2), generator=rng)
    weights = torch.randint(-4, 5, (8, 128, 256), generator=rng).to(torch.float8_e4m3fn)
    blocks = 2.0 ** torch.randint(-1, 2, (8, 1, 2), generator=rng)
    decode = lambda v, s: v.float() * s.repeat_interleave(128, -1)  # noqa: E731
    matrices = decode(weights, blocks.expand(8, 128, 2))

    def contiguous(a, b, out, m_indices):
        assert a[1].stride() == (1, len(a[0])) and len(a[0]) % 128 == 0
        rows = decode(*a)
        for start in range(0, len(rows), 128):
            block = m_indices[start : start + 128]
            live = block >= 0
            assert (block[live] == block[0]).all() and live[: live.sum()].all()
            out[start : start + 128] = torch.nan
            at = slice(start, start + int(live.sum()))
            out[at] = (rows[at] @ matrices[block[0]].T).bfloat16()

    def masked(a, b, out, masked_m, expected_m):
        assert a[1].stride()[1:] == (1, a[0].shape[1]) and a[0].shape[1] % 128 == 0
        assert expected_m == -(-210 // 8)
        for e, count in enumerate(masked_m.tolist()):
            out[e] = torch.nan
            out[e, :count] = (decode(a[0][e], a[1][e])[:count] @ matrices[e].T).bfloat16()

    stand_in = types.SimpleNamespace(
        m_grouped_fp8_fp4_gemm_nt_contiguous=contiguous,
        m_grouped_fp8_fp4_gemm_nt_masked=masked,
        set_mk_alignment_for_contiguous_layout=lambda alignment: None,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    got = sglang.grouped_gemm(values, scales, (weights, blocks), ids=ids, layout=layout)
    want = torch.einsum("tkh,tknh->tkn", decode(values, scales), matrices[ids.long()])
    assert torch.equal(got, want.bfloat16())


@pytest.mark.skipif(not ON_GPU, reason="SGLang's kernels need a GPU")
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe"])
def test_sglangs_gemms_give_the_same_bits_and_the_rest_but_for_its_fast_division(model, layout):
    reason = parity.unavailable("sglang", "fp8_block")
    if reason:
        pytest.skip(reason)
    case = parity.make_case(
        model,
        tokens=257,
        num_experts=32,
        hidden=1024,
        inner=512,
        top_k=4,
        recipe="fp8_block",
        layout=layout,
        keep_fp32=False,
    )
    lines = {line.stage: line for line in parity.compare(case, "sglang")}
    assert [line for line in lines.values() if not line.ok] == []
    assert lines["gate and up"].differing == lines["down"].differing == 0
    jax.block_until_ready(case.layer.params)


@pytest.mark.skipif(not ON_GPU, reason="SGLang's kernels need a GPU")
def test_sglangs_scales_are_multiplied_by_a_rounded_inverse():
    if reason := parity.unavailable("sglang", "fp8_block"):
        pytest.skip(reason)
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    x = torch.randn(512, 1024, device="cuda").bfloat16()
    amax = x.float().unflatten(1, (-1, 128)).abs().amax(-1)
    assert torch.equal(sglang_per_token_group_quant_fp8(x, 128)[1], amax * np.float32(1 / 448))


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = cli("--model", "mixtral")
    assert done.exit_code == 2 and "pip install 'dgmoe_jax[parity]'" in done.stderr
