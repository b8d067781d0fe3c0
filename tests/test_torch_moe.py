"""TorchMoE against transformers, in whole models with small random weights.

The models are f32 on weights that are bf16 numbers: then their routers see what ours sees, and no
near tie is decided by a rounding of theirs. The layer rounds as its bf16 recipe does.
"""

import concurrent.futures
import copy
import dataclasses
import gc
import pickle
import sys
import weakref

import jax
import numpy as np
import pytest
import torch
import transformers
from conftest import ON_GPU, error, random_layer, same_bits, tokens
from dgmoe_jax.interop import TorchMoE, dlpack, replace_moe_blocks, to_jax, to_torch, torch_moe

import dgmoe_jax as dg

DEVICE = "cuda" if ON_GPU else "cpu"
torch.set_num_threads(1)  # of operations this small, more only wait for each other
SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    num_experts_per_tok=2,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    experts_implementation="eager",
    attn_implementation="eager",
)
DEEPSEEK = dict(
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    num_hidden_layers=3,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
QWEN = dict(moe_intermediate_size=32, num_experts=8)
MODELS = {
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v4": (
        "DeepseekV4",
        dict(
            moe_intermediate_size=32,
            n_routed_experts=8,
            mlp_layer_types=["hash_moe", "moe"],
            swiglu_limit=0.75,
            q_lora_rank=32,
            o_lora_rank=16,
            o_groups=2,
            num_key_value_heads=1,
            head_dim=32,
            qk_rope_head_dim=16,
            partial_rotary_factor=0.5,
            index_n_heads=2,
            index_head_dim=16,
            index_topk=4,
            layer_types=["sliding_attention", "sliding_attention"],
            sliding_window=32,
        ),
    ),
    "qwen3_moe": ("Qwen3Moe", dict(QWEN, norm_topk_prob=True)),
    "qwen2_moe": ("Qwen2Moe", dict(QWEN, shared_expert_intermediate_size=64)),
    "mixtral": ("Mixtral", dict(num_local_experts=8)),
    "glm4_moe": (
        "Glm4Moe",
        dict(DEEPSEEK, n_group=1, topk_group=1, num_key_value_heads=2, routed_scaling_factor=2.5),
    ),
    "minimax_m2": ("MiniMaxM2", dict(num_local_experts=8)),
}
every_model = pytest.mark.parametrize("family", MODELS)


@torch.no_grad()
def make_model(family, seed=0):
    """Weights that are bf16 numbers; a correction bias that decides many choices; a hash table."""
    name, sizes = MODELS[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        parameter.copy_(parameter.bfloat16())
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1, generator=generator)
        elif path.endswith("tid2eid"):
            buffer.copy_(torch.randint(0, 8, buffer.shape, generator=generator))
    return model.to(DEVICE)


def moe_blocks(model):
    return [m for m in model.modules() if torch_moe._is_block(m) or isinstance(m, TorchMoE)]


@torch.no_grad()
def run_and_record(model, ids):
    """Logits, and for every MoE block the tokens that came in and the experts that they took."""
    taken, hooks = [], []
    for block in moe_blocks(model):
        if isinstance(block, TorchMoE):

            def before(block, args, kwargs):
                taken.append((args[0].clone(), block.route(args[0], kwargs.get("input_ids"))[0]))

            hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
        else:

            def after(gate, args, result):
                taken.append((args[0].clone(), result[2]))

            hooks.append(block.gate.register_forward_hook(after))
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return logits, taken


@every_model
@torch.no_grad()
def test_a_whole_model_gives_the_same_experts_and_logits(family):
    model = make_model(family)
    ids = torch.randint(0, 96, (3, 21), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want, their_choice = run_and_record(model, ids)
    count = len(moe_blocks(model))
    names = replace_moe_blocks(model)
    assert len(names) == count == 2 and all(name.endswith("mlp") for name in names)
    before = ids.clone()
    got, our_choice = run_and_record(model, ids)
    assert torch.equal(ids, before)
    for (_, theirs), (_, ours) in zip(their_choice, our_choice, strict=True):
        assert torch.equal(theirs.sort(-1).values, ours.long().sort(-1).values)
    # Two layers, each off by the 0.45 % of test_parity_transformers at most, added to a residual.
    assert 0 < error(got.cpu(), want.cpu()) < 2 * 0.0045
    # The check can fail: with the experts of another layer the model differs.
    model.set_submodule(names[0], model.get_submodule(names[1]))
    assert error(model(ids).logits.cpu(), want.cpu()) > 10 * 0.0045


def learn(model, text, steps=60):
    """Until it is as sure of each next token as a trained model is: the logits of random weights
    are so close that any rounding decides some token of 64."""
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = model(text, labels=text).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return loss.item()


def generate(model, text):
    return model.generate(text[:, :4], max_new_tokens=64, min_new_tokens=64, do_sample=False)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v4", "qwen3_moe", "mixtral", "glm4_moe"]
)
def test_greedy_decoding_gives_the_same_text(family):
    model = make_model(family)
    text = torch.randint(0, 96, (1, 68), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert learn(model, text) < 0.1
    want = generate(model, text)
    assert want.shape == (1, 4 + 64)
    names = replace_moe_blocks(model)
    assert torch.equal(generate(model, text), want)
    for name in names:  # the experts matter to the text
        model.set_submodule(name, First())
    assert not torch.equal(generate(model, text), want)


class First(torch.nn.Module):
    def forward(self, hidden_states, input_ids=None):
        return hidden_states


# --- the module


def make_module(**kw):
    layer = random_layer(experts=8, hidden=192, inner=64, **kw)
    return TorchMoE(layer.cfg, layer.params), layer


def given(count=33, dtype=torch.bfloat16, hidden=192):
    return torch.from_numpy(tokens(count, hidden).astype(np.float32)).to(DEVICE, dtype)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_it_is_the_jitted_layer_bit_for_bit_and_leaves_its_input_alone(recipe):
    module, layer = make_module(recipe=recipe, shared=1)
    x = given()
    before = x.clone()
    y = module(x)
    assert y.dtype == x.dtype and y.device == x.device and y.shape == x.shape
    same_bits(to_jax(y), layer(to_jax(x)))
    assert torch.equal(x, before) and x.sum().isfinite()
    # Other shapes of the same tokens, and tokens that cannot be shared as they lie.
    assert torch.equal(module(x.view(3, 11, 192)), y.view(3, 11, 192))
    wide = torch.zeros(33, 200, dtype=x.dtype, device=DEVICE)
    wide[:, 3:195] = x
    assert torch.equal(module(wide[:, 3:195]), y)
    assert module(x[:0]).shape == (0, 192)
    assert torch.equal(module(x[5]), y[5])


def test_f32_tokens_are_routed_as_they_are():
    module, layer = make_module()
    x = given(dtype=torch.float32)
    # They are bf16 numbers: the same layer, but for the last bit of a routing weight.
    assert module(x).dtype == torch.float32
    assert error(module(x).cpu(), module(x.bfloat16()).float().cpu()) < 1e-3
    # Tokens whose choice turns on what bf16 cannot hold.
    x = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 1e-3
    ids, weights = module.route(x)
    logits = (
        x.double() @ torch.from_numpy(np.array(layer.raw["gate_weight"], np.float64)).to(DEVICE).T
    )
    assert torch.equal(ids.long().sort(-1).values, logits.topk(2).indices.sort(-1).values)
    routing = dg.Routing(to_jax(ids), to_jax(weights))
    y = dg.moe_layer(to_jax(x.bfloat16()), layer.params, layer.cfg, routing=routing)
    assert error(module(x).cpu(), y) < 1e-3


def test_f32_tokens_keep_the_gate_of_fused_shared_experts():
    router = dg.RouterConfig(top_k=2, fused_shared_experts=1)
    module, layer = make_module(shared=1, router=router)
    x = given(dtype=torch.float32)
    without = module(x)
    raw = {**layer.raw, "shared_gate_weight": tokens(1, 192)}
    module = TorchMoE(layer.cfg, dg.prepare_params(raw, layer.cfg))
    assert error(module(x).cpu(), module(x.bfloat16()).float().cpu()) < 1e-3
    assert error(module(x).cpu(), without.cpu()) > 0.1  # the gate matters


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_is_one_operator_and_no_graph_break(backend):
    module, _ = make_module()

    def block(x):
        return torch.relu(module(x * 2)) + 1

    x = given()
    want = block(x)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(x), want)
        assert torch.equal(compiled(x[:7].clone()), block(x[:7]))
    assert torch.Tag.cudagraph_unsafe in torch.ops.dgmoe_jax.moe.default.tags


def test_the_operator_passes_torchs_own_checks():
    module, _ = make_module()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.dgmoe_jax.moe.default, (given(), None, module._number), test_utils=checks
    )


def test_copies_and_pickles_are_layers_of_their_own():
    module, _ = make_module()
    x = given()
    want = module(x)
    others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    del module
    gc.collect()
    for other in others:
        assert torch.equal(other(x), want)


def test_a_module_that_is_gone_leaves_nothing():
    module, _ = make_module(seed=3)
    number, gone = module._number, weakref.ref(module)
    module(given())
    del module
    gc.collect()
    assert gone() is None and number not in torch_moe._layers


def test_what_does_not_fit_is_refused_by_name():
    module, layer = make_module()
    x = given()
    for bad, kind, says in (
        (x.half(), TypeError, "float16"),
        (x[:, :191], ValueError, r"shape \(33, 191\), must be \(\.\.\., 192\)"),
        (x.clone().requires_grad_(), NotImplementedError, "no derivative"),
        (x.to("meta"), ValueError, "hidden_states: torch.strided on meta, must be"),
    ):
        with pytest.raises(kind, match=says):
            module(bad)
    with torch.no_grad():
        assert torch.equal(module(x.clone().requires_grad_()), module(x))
    with pytest.raises(TypeError, match="cfg: dict"):
        TorchMoE({}, layer.params)
    with pytest.raises(ValueError, match="no MoE block"):
        replace_moe_blocks(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"Linear, must be a MoE block"):
        TorchMoE.from_hf(torch.nn.Linear(2, 2))
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_local_experts=4, num_hidden_layers=1
    )
    block = transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP(config)
    with pytest.raises(NotImplementedError, match=r"model_type='gpt_oss', must be in .*mixtral"):
        TorchMoE.from_hf(block)


def test_a_model_of_which_one_block_does_not_fit_is_left_as_it_was():
    model = make_model("mixtral")
    before = moe_blocks(model)
    before[1].experts.down_proj.data = before[1].experts.down_proj.data[:, :, :-1]
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp: .*down_proj"):
        replace_moe_blocks(model)
    assert moe_blocks(model) == before
    with pytest.raises(TypeError, match=r"^model\.layers\.0\.mlp: .*float16, and .*bfloat16"):
        replace_moe_blocks(model.half())
    assert moe_blocks(model) == before


def test_a_model_without_its_experts_is_not_saved(tmp_path):
    model = make_model("mixtral")
    replace_moe_blocks(model)
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(NotImplementedError, match=r"layers\.0\.mlp.*before replace_moe_blocks"):
            save()
    assert not [*tmp_path.glob("*.safetensors")]


def test_a_hash_router_needs_token_ids():
    model = make_model("deepseek_v4")
    names = replace_moe_blocks(model)
    first = model.get_submodule(names[0])
    with pytest.raises(ValueError, match="input_ids: missing"):
        first(given(4, hidden=64))
    assert first.cfg.router.selection == "hash" and first.cfg.activation == dg.SiLU(limit=0.75)


def test_many_calls_leak_nothing():
    module, _ = make_module()
    x = given()

    def calls(count):
        for _ in range(count):
            module(x)
        gc.collect()
        return len(jax.live_arrays())

    calls(3)
    before = calls(3)
    assert calls(300) <= before + 1


@pytest.mark.skipif(not ON_GPU, reason="streams need a GPU")
def test_tokens_of_a_busy_stream_are_read_once_written_and_may_be_written_at_once():
    layer = random_layer(experts=8, hidden=1024, inner=512)
    module = TorchMoE(layer.cfg, layer.params)
    x = given(4096, hidden=1024)
    want = module(x).clone()
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        tokens_now = torch.full_like(x, torch.nan)
        for _ in range(4):
            busy = torch.tanh(busy @ busy)
        tokens_now.copy_(x)
        y = module(tokens_now)
        tokens_now.fill_(torch.nan)
        del tokens_now
        junk = torch.full_like(x, torch.nan)
        assert torch.equal(y, want)
        del junk


def test_another_configuration_is_that_of_the_layer_and_of_its_router():
    module, layer = make_module()
    x, cfg = given(), dataclasses.replace(layer.cfg, router=dg.RouterConfig(top_k=1))
    assert not torch.equal(TorchMoE(cfg, layer.params)(x), module(x))
    module.cfg = cfg
    assert torch.equal(TorchMoE(cfg, layer.params)(x), module(x))
    assert module.route(x)[0].shape[1] == 1


def test_without_the_ffi_library_no_stream_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", None)
    assert dlpack.programs_stream.__wrapped__(torch.device("cuda", 0)) is None


@pytest.mark.skipif(not ON_GPU, reason="streams need a GPU")
def test_all_programs_run_on_one_stream_which_torch_can_make_wait():
    device = given().device
    stream = dlpack.programs_stream(device)
    assert stream
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(dlpack.programs_stream.__wrapped__, device) for _ in range(4)]
    assert {found.result() for found in others} == {stream}


@pytest.mark.skipif(not ON_GPU, reason="JAX waits for a CPU's tokens")
def test_the_memory_of_tokens_is_not_kept_and_may_hold_others():
    layer = random_layer(experts=8, hidden=1024, inner=512)
    module = TorchMoE(layer.cfg, layer.params)
    first, second = given(64, hidden=1024), given(64, hidden=1024) * 2
    wants = [module(x).clone() for x in (first, second)]
    addresses = set()
    for idle in (True, False) * 20:
        for x, want in zip((first, second), wants, strict=True):
            if idle:  # then JAX takes an earlier view of the same memory
                torch.cuda.synchronize()
            tokens_now = x.clone()
            if idle:
                torch.cuda.synchronize()
            addresses.add(tokens_now.data_ptr())
            before = torch.cuda.memory_allocated()
            y = module(tokens_now)
            del tokens_now
            assert torch.cuda.memory_allocated() < before or not idle
            assert torch.equal(y, want)
    assert len(addresses) < 8


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_capturing_callers_are_refused():
    module, _ = make_module()
    x = given()
    module(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="CUDA graph"):
        module(x)
    assert to_torch(to_jax(x)).data_ptr() == x.data_ptr()
