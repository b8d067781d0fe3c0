"""`TorchMoE`: the layer as a torch module, and in the place of a transformers model's blocks.

Tokens and result are handed over where they lie (`dlpack`). The result makes torch's stream wait
for the layer, so whatever torch does next may write or free the tokens: no caller needs to know
of JAX's streams.

`torch.compile`: the layer is one custom operator, `dgmoe_jax::moe`, opaque to the compiler, with a
shape function; a graph does not break at it. Each number of tokens is a program of JAX's, compiled
at its first call, as under `jax.jit`: pad to a few sizes and call each once. (`dgmoe_jax.warmup`
compiles DeepGEMM's kernels ahead, not these programs.)

CUDA graphs: JAX's programs cannot be captured into one of torch's, and a call while the stream is
being captured raises. The operator is tagged `cudagraph_unsafe`, by which `torch.compile` graphs
what lies between the layers; who captures by hand does the same.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from dgmoe_jax.interop import dlpack

import dgmoe_jax as dg
from dgmoe_jax.steps.route import router_logits
from dgmoe_jax.weights.families import DENSE, FAMILIES, HASHED
from dgmoe_jax.weights.hf import read_hf

FAMILIES_READ = tuple(kind for kind in FAMILIES if kind != "gpt_oss")
"""model_type of the models whose blocks `from_hf` takes. gpt-oss's returns a pair, and its experts
and router have biases, which the layer has not."""

_DTYPES = (torch.bfloat16, torch.float32)
_layers: weakref.WeakValueDictionary[int, TorchMoE] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _operator() -> torch.library.Library:
    """`dgmoe_jax::moe(x [T, H], token_ids [T] int32 or None, number of the layer) -> y [T, H]`."""
    library = torch.library.Library("dgmoe_jax", "DEF")
    library.define(
        "moe(Tensor x, Tensor? token_ids, int layer) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
    )
    for key in ("CPU", "CUDA"):
        library.impl("moe", lambda x, ids, layer: _layers[layer]._run(x, ids), key)
    fake = lambda x, ids, layer: torch.empty_like(x)  # noqa: E731
    torch.library.register_fake("dgmoe_jax::moe", fake, lib=library)
    return library


_library = _operator()  # the operator lives as long as this object


class TorchMoE(torch.nn.Module):
    """`moe_layer` on torch tensors, for inference.

    Its weights are JAX's and in no `state_dict`: `state_dict()` and `save_pretrained()` of a model
    with such a layer raise NotImplementedError. Save the model before `replace_moe_blocks`, and the
    layer by `dgmoe_jax.save(path, module.cfg, module.params)` or by pickle. The weights stay on the
    device where `params` lie: `.to()` moves nothing, and tokens come on the same device.
    """

    def __init__(self, cfg: dg.MoEConfig, params: dg.MoEParams):
        """cfg, params: as `moe_layer` takes them. Raises TypeError for anything else."""
        super().__init__()
        for name, value, cls in (("cfg", cfg, dg.MoEConfig), ("params", params, dg.MoEParams)):
            if not isinstance(value, cls):
                raise TypeError(f"{name}: {type(value).__name__}, must be a {cls.__name__}")
        (device,) = params.gate_weight.devices()
        # Committed, since tokens from torch are: JAX would move the weights to them at each call.
        self.cfg, self.params = cfg, jax.device_put(params, device)
        self._number = next(_numbers)
        _layers[self._number] = self

    @property
    def cfg(self) -> dg.MoEConfig:
        """As `moe_layer` takes it. Another may be set, which `params` must fit."""
        return self._cfg

    @cfg.setter
    def cfg(self, cfg: dg.MoEConfig) -> None:
        self._cfg, self._layer = cfg, _layer(cfg)

    def __reduce__(self):
        return TorchMoE, (self.cfg, self.params)  # a copy or a pickle gets a number of its own

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        raise NotImplementedError(
            f"state_dict: {prefix.rstrip('.') or 'TorchMoE'} has its weights in JAX, a checkpoint"
            " would lack them; save the model before replace_moe_blocks, this layer by"
            " dgmoe_jax.save(path, module.cfg, module.params)"
        )

    @classmethod
    def from_hf(
        cls,
        block: torch.nn.Module,
        *,
        config: Any = None,
        recipe: str | None = None,
        layout: str = "auto",
        backend: str = "auto",
    ) -> TorchMoE:
        """The layer of a transformers MoE block, which is left as it is.

        Args:
          block: of a model whose `model_type` is in `FAMILIES_READ`: `DeepseekV3MoE`,
            `Qwen3MoeSparseMoeBlock`, ...; weights in bf16, f32 or block FP8.
          config: the model's; None: the one that the block's experts keep.
          recipe: `cfg.recipe`; None: that of the weights as they are.
          layout, backend: of `cfg`.

        Raises:
          TypeError: no such block; one in f16, whose model's tokens the layer does not take.
          ValueError: weights that the config does not describe; weights on a device that is not
            JAX's kind of device.
          NotImplementedError: another model, or one whose block computes something else.
        """
        experts = getattr(block, "experts", None)
        if not isinstance(experts, torch.nn.Module):
            raise TypeError(f"block: {type(block).__name__}, must be a MoE block with .experts")
        config = getattr(experts, "config", None) if config is None else config
        kind = getattr(config, "model_type", None)
        if kind not in FAMILIES_READ:
            raise NotImplementedError(
                f"block: {type(block).__name__} of model_type={kind!r}, must be in {FAMILIES_READ}"
            )
        tensors = block.state_dict()
        half = [name for name, tensor in tensors.items() if tensor.dtype == torch.float16]
        if half:
            raise TypeError(
                f"block: {half[0]} has dtype torch.float16, and tokens must be in {_DTYPES};"
                " model.to(torch.bfloat16) converts"
            )
        device = dlpack.jax_device(next(iter(tensors.values())).device)
        if device.platform != jax.default_backend():  # whose kernels and plans the layer is made of
            raise ValueError(
                f"block: on {device.platform}, and JAX's default is {jax.default_backend()!r}: move"
                " the model, or set JAX_PLATFORMS"
            )
        # Of one layer, whichever it was: this block is not dense, and has a table or has none.
        table = any(name.endswith("tid2eid") for name in tensors)
        one = {k: v for k, v in config.to_dict().items() if k not in {*DENSE, *HASHED}}
        one |= {"num_hidden_layers": 1, "mlp_layer_types": ["hash_moe" if table else "moe"]}
        names = FAMILIES[kind].names[-1]  # as transformers holds them in memory
        prefix = f"model.layers.0.{names.block}"
        with jax.default_device(device):
            cfg, raw = read_hf(
                {prefix + name: _on_host(t) for name, t in tensors.items()},
                0,
                config=one,
                recipe=recipe,
                layout=layout,
                backend=backend,
                progress=False,
            )
            return cls(cfg, dg.prepare_params(raw, cfg))

    def forward(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden_states [..., H] bf16 or f32 -> the same shape and dtype.

        f32 tokens choose their experts as they are, and are rounded to bf16 for the experts.
        input_ids [...]: token ids, any int dtype, for hash selection; otherwise not read.

        Raises:
          TypeError, ValueError: what does not fit the layer; a tensor without memory (meta).
          NotImplementedError: a gradient is asked for.
          RuntimeError: the current stream is being captured into a CUDA graph.
        """
        x, token_ids = self._checked(hidden_states, input_ids)
        if torch.compiler.is_compiling():
            y = torch.ops.dgmoe_jax.moe(x, token_ids, self._number)
        else:  # torch's dispatcher takes as long as both hand-overs
            y = self._run(x, token_ids)
        return y if hidden_states.ndim == 2 else y.view(hidden_states.shape)

    def route(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `forward` chooses: ids [T, k] int32, weights [T, k] f32 without scaling factor.
        Raises what `forward` does."""
        checked = self._checked(hidden_states, input_ids)
        topk_ids, topk_weights = self._on_jax(_route(self.cfg), *checked)
        return topk_ids, topk_weights

    def _checked(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [T, H], and their ids [T] int32 where the router reads them."""
        dlpack.check_memory("hidden_states", hidden_states)
        hidden, by_hash = self.cfg.hidden_size, self.cfg.router.selection == "hash"
        if hidden_states.dtype not in _DTYPES:
            raise TypeError(f"hidden_states: dtype {hidden_states.dtype}, must be in {_DTYPES}")
        if hidden_states.ndim < 1 or hidden_states.shape[-1] != hidden:
            raise ValueError(
                f"hidden_states: shape {tuple(hidden_states.shape)}, must be (..., {hidden})"
            )
        if by_hash and input_ids is None:
            raise ValueError("input_ids: missing, with router.selection='hash'")
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "hidden_states: requires grad, and the layer has no derivative; call it under"
                " torch.no_grad() or torch.inference_mode()"
            )
        x = hidden_states if hidden_states.ndim == 2 else hidden_states.reshape(-1, hidden)
        if not by_hash:
            return x, None
        if input_ids.is_floating_point() or input_ids.is_complex():
            raise TypeError(f"input_ids: dtype {input_ids.dtype}, must be an int dtype")
        return x, input_ids.reshape(-1).to(torch.int32)

    def extra_repr(self) -> str:
        return str(self.cfg)

    def _on_jax(
        self, jitted: Callable, x: torch.Tensor, token_ids: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Its arrays. x and ids, which may be copies, live until torch's stream waits for these."""
        x = dlpack.shareable(x.detach() if x.requires_grad else x)
        ids = None if token_ids is None else dlpack.shareable(token_ids)
        found = jitted(dlpack.borrow(x), self.params, None if ids is None else dlpack.borrow(ids))
        return [dlpack.give(y, x.device) for y in found]

    def _run(self, x: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        (y,) = self._on_jax(self._layer, x, token_ids)
        return y


def replace_moe_blocks(model: torch.nn.Module, **options: Any) -> list[str]:
    """Puts a `TorchMoE` in the place of every MoE block of a transformers model.

    All or none: every layer is made before the first block goes, so the weights are there twice
    meanwhile. Where memory is short, `model.set_submodule(name, TorchMoE.from_hf(block))` does one
    block at a time. The model's `router_logits` outputs are gone with the routers that it recorded
    them from, and it can no longer be saved (`TorchMoE`).

    Args:
      model: changed in place.
      options: of `TorchMoE.from_hf`.

    Returns:
      The names of the modules that were replaced, in the model's order.

    Raises:
      ValueError: a model without MoE blocks. Whatever `from_hf` raises for a block, with the
        block's name. The model is then as it was.
    """
    blocks = [name for name, module in model.named_modules() if _is_block(module)]
    if not blocks:
        raise ValueError(f"model: {type(model).__name__} has no MoE block (a module with .experts)")
    layers = {}
    for name in blocks:
        try:
            layers[name] = TorchMoE.from_hf(model.get_submodule(name), **options)
        except (TypeError, ValueError, NotImplementedError) as problem:
            raise type(problem)(f"{name}: {problem}") from problem
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return blocks


def _is_block(module: torch.nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    return isinstance(experts, torch.nn.Module) and hasattr(experts, "down_proj")


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    """Any dtype that either numpy or `ml_dtypes` knows; no copy of what is on the host."""
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        name = str(tensor.dtype).removeprefix("torch.")
        return tensor.view(torch.uint8).numpy().view(jnp.dtype(name))


def _logits_and_routing(x, params, token_ids, cfg, backend):
    return dg.route(
        router_logits(x, params.gate_weight),
        cfg.router,
        bias=params.gate_bias,
        token_ids=token_ids,
        hash_table=params.hash_table,
        backend=backend,
    )


# Programs of a configuration alone, so that a model's layers share one; as a static argument it
# would be looked up by its hash at each call.
@functools.cache
def _route(cfg: dg.MoEConfig) -> Callable:
    def route(x, params, token_ids):
        backend = dg.plan(cfg, x.shape[0]).backend
        routing = _logits_and_routing(x, params, token_ids, cfg, backend)
        return [routing.topk_ids, routing.topk_weights]

    return jax.jit(route)


@functools.cache
def _layer(cfg: dg.MoEConfig) -> Callable:
    def layer(x, params, token_ids):
        if x.dtype == jnp.bfloat16:
            return [dg.moe_layer(x, params, cfg, token_ids=token_ids)]
        distinct = cfg.router.selection == "scores"
        plan = dg.plan(cfg, x.shape[0], top_k=cfg.router.num_slots, distinct_ids=distinct)
        routing = _logits_and_routing(x, params, token_ids, cfg, plan.backend)
        y = dg.moe_layer(x.astype(jnp.bfloat16), params, cfg, routing=routing, plan=plan)
        return [y.astype(x.dtype)]

    return jax.jit(layer)
