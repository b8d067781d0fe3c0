"""`load_hf`: one MoE layer of a Hugging Face checkpoint."""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dgmoe_jax.config import MoEConfig, RouterConfig
from dgmoe_jax.progress import bar
from dgmoe_jax.recipes import BESIDE
from dgmoe_jax.types import MoEParams
from dgmoe_jax.weights.families import DENSE, FAMILIES, HASHED, KNOWN, NUM_EXPERTS, Family
from dgmoe_jax.weights.prepare import prepare_params
from dgmoe_jax.weights.reader import Reader
from dgmoe_jax.weights.tensors import Checkpoint, read_json


def load_hf(
    source: str | os.PathLike | Mapping[str, Any],
    layer: int,
    *,
    config: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    router: RouterConfig | None = None,
    layout: str = "auto",
    backend: str = "auto",
    arch: str | None = None,
    progress: bool = True,
) -> tuple[MoEConfig, MoEParams]:
    """One MoE layer of a Hugging Face checkpoint -> `(cfg, params)` for `moe_layer`.

    Reads DeepSeek-V3 (and R1, V3.1, V3.2), DeepSeek-V4, Qwen2-MoE, Qwen3-MoE, Mixtral, GLM-4-MoE,
    Kimi-K2, MiniMax-M2 and gpt-oss, their weights in bf16 (f16, f32), block FP8, per-tensor FP8,
    MXFP8 or MXFP4, with shared experts, their gate, correction bias and hash table. Only that
    layer's tensors are read, from memory-mapped files, one expert at a time.

    Weights stay in the encoding they come in, with their scales, if `recipe` reads it;
    DeepSeek-V4's shared experts stay FP8 beside experts in MXFP4. Otherwise they are dequantised to
    bf16, a matrix at a time, and `prepare_params` quantises them again, with a warning where no
    `recipe` asks for it. Per-tensor FP8 scales become the same scale for every block; scales of
    activations (`input_scale`) are not read, since activations are scaled as they come.

    Args:
      source: a folder with config.json and model.safetensors or its shards and index; or a mapping
        of the checkpoint's names to arrays.
      layer: index of the decoder layer. DeepSeek-V3's, GLM-4's and Kimi-K2's predictors of further
        tokens follow the last one, where the checkpoint has them.
      config: what config.json says (`model.config.to_dict()`); needed with a mapping.
      recipe: `cfg.recipe`; None: that of the experts as they are stored.
      router: `cfg.router`; None: the model's.
      layout, backend: of `cfg`.
      arch: as `prepare_params` takes it.
      progress: show a bar (where rich is installed).

    Raises:
      ValueError, FileNotFoundError: a damaged checkpoint or one that config.json does not describe;
        the text names the file, the tensor and what was expected. A dense layer. A tensor of the
        block that nothing reads.
      NotImplementedError: an unknown model or quantisation; what the layer cannot compute, by name:
        biases of experts and of the router's logits (gpt-oss has both) unless they are all zeros.
    """
    cfg, raw = read_hf(
        source,
        layer,
        config=config,
        recipe=recipe,
        router=router,
        layout=layout,
        backend=backend,
        progress=progress,
    )
    return cfg, prepare_params(raw, cfg, arch=arch)


def read_hf(
    source: str | os.PathLike | Mapping[str, Any],
    layer: int,
    *,
    config: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    router: RouterConfig | None = None,
    layout: str = "auto",
    backend: str = "auto",
    progress: bool = True,
) -> tuple[MoEConfig, dict[str, np.ndarray]]:
    """`load_hf` without `prepare_params`: `(cfg, raw)`, raw in host memory."""
    tensors = Checkpoint(source)
    if config is None:
        if tensors.folder is None:
            raise ValueError("config: missing; a mapping of tensors needs the model's")
        config, where = read_json(tensors.folder / "config.json"), tensors.folder / "config.json"
    else:
        where = "config"
    model = _Model(config, where, layer)
    num_experts, hidden, inner = model.sizes
    reader = Reader(tensors, model.family.names, layer, num_experts)
    reader.check_biases()
    names, router = reader.names, model.router if router is None else router
    sizes = (names.experts, num_experts, hidden, inner)
    shared = (names.shared, 1, hidden, model.num_shared * inner)
    cfg = MoEConfig(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=inner,
        router=router,
        activation=model.activation,
        recipe=reader.recipe(*sizes) if recipe is None else recipe,
        num_shared_experts=model.num_shared,
        layout=layout,
        backend=backend,
    )

    raw = {"gate_weight": reader.array(names.gate, (num_experts, hidden))}
    if model.hashed:
        shape = (model["vocab_size"], router.top_k)
        raw["hash_table"] = reader.array(names.table, shape, ("int64", "int32"))
        _check_ids(reader.where(names.table), raw["hash_table"], num_experts)
    if names.bias and (not model.hashed or reader.has(names.bias)):
        raw["gate_bias"] = reader.array(names.bias, (num_experts,))
    with bar(f"layer {layer}, matrices", 2 * num_experts, progress) as advance:
        raw |= reader.block(*sizes, cfg.recipe, advance)
    if model.num_shared:
        stored, kept = reader.recipe(*shared), cfg.recipe
        if stored == BESIDE.get(cfg.recipe):
            kept = stored
        if recipe is None and stored not in ("bf16", kept):
            warnings.warn(
                f"{reader.where(names.shared.name(0, 0))}: shared experts are stored for recipe"
                f" {stored!r} and quantised again for {cfg.recipe!r}; recipe={stored!r} keeps them,"
                " and requantises the experts",
                stacklevel=3,
            )
        for name, array in reader.block(*shared, kept).items():
            raw[f"shared_{name}"] = array[0]
        if names.shared_gate:
            raw["shared_gate_weight"] = reader.array(names.shared_gate, (1, hidden))
    reader.check_all_read()
    return cfg, raw


def _check_ids(where: str, table: np.ndarray, num_experts: int) -> None:
    # As prepare_params does, which does not know the file.
    if table.size and (table.min() < 0 or table.max() >= num_experts):
        raise ValueError(
            f"{where}: ids {table.min()}..{table.max()}, expected ids in [0, {num_experts})"
        )


class _Model:
    """What config.json says of one layer."""

    def __init__(self, config: Mapping[str, Any], where: str | Path, layer: int):
        self.config, self.where = config, where
        if isinstance(layer, bool) or not isinstance(layer, numbers.Integral):
            raise TypeError(f"layer={layer!r}: must be an int")
        kind = self["model_type"]
        if kind not in FAMILIES:
            raise NotImplementedError(f"{where}: model_type={kind!r}, must be in {[*FAMILIES]}")
        self.family: Family = FAMILIES[kind]
        for key, known in KNOWN.items():
            if key in config and config[key] not in known:
                raise NotImplementedError(f"{where}: {key}={config[key]!r}, must be in {known}")
        self._check_quantization()
        further = "num_nextn_predict_layers"
        last = self._size("num_hidden_layers")
        last += self._size(further) if config.get(further) else 0
        if not 0 <= layer < last:
            raise ValueError(f"layer={layer}: must be in [0, {last}) ({where})")
        dense = self._first(DENSE, layer)
        if dense:
            raise ValueError(
                f"layer={layer}: dense, not MoE, by {dense}={config[dense]!r} ({where})"
            )
        self.hashed = self._first(HASHED, layer) is not None
        experts = next((key for key in NUM_EXPERTS if key in config), NUM_EXPERTS[0])
        inner = self._size(self.family.inner)
        self.sizes = (self._size(experts), self._size("hidden_size"), inner)
        self.num_shared = self._num_shared(inner)
        fields = self._fields(self.family.router)
        if self.hashed:
            fields["selection"] = "hash"
        self.router = self.family.preset(**fields)
        self.activation = self.family.activation(**self._fields(self.family.activation_fields))

    def __getitem__(self, key: str) -> Any:
        if key not in self.config:
            raise ValueError(f"{self.where}: no {key!r}, which the layer needs")
        return self.config[key]

    def _first(self, rules: Mapping[str, Callable[[int, Any], bool]], layer: int) -> str | None:
        """The first key by which its rule holds of the layer."""
        for key, holds in rules.items():
            value = self.config.get(key)
            try:
                if value is not None and holds(layer, value):
                    return key
            except (TypeError, ZeroDivisionError):
                raise ValueError(f"{self.where}: {key}={value!r}: says nothing of layers") from None
        return None

    def _size(self, key: str) -> int:
        if not isinstance(self[key], int) or self[key] < 1:
            raise ValueError(f"{self.where}: {key}={self[key]!r}, expected a positive int")
        return self[key]

    def _fields(self, keys: Mapping[str, str]) -> dict[str, Any]:
        return {
            name: self[key]
            for name, key in keys.items()
            if key not in self.family.optional or key in self.config
        }

    def _num_shared(self, inner: int) -> int:
        if self.family.num_shared:
            return self[self.family.num_shared] or 0
        if not self.family.shared_inner:
            return 0
        width = self._size(self.family.shared_inner)
        if width % inner:
            raise NotImplementedError(
                f"{self.where}: {self.family.shared_inner}={width}, must be a multiple of"
                f" {self.family.inner}={inner}"
            )
        return width // inner

    def _check_quantization(self) -> None:
        """Refuses by name what the tensors' dtypes alone would not explain."""
        quantization = self.config.get("quantization_config") or {}
        if not isinstance(quantization, Mapping):
            raise ValueError(
                f"{self.where}: quantization_config={quantization!r}, expected a table"
            )
        method, form = quantization.get("quant_method"), quantization.get("format")
        known = (None, "fp8", "mxfp4", "mxfp8", "compressed-tensors")
        if method not in known or (method == "compressed-tensors" and form != "float-quantized"):
            raise NotImplementedError(
                f"{self.where}: quant_method={method!r}, format={form!r}, must be one of"
                f" {known[1:]}, the last with format 'float-quantized'"
            )
        block = quantization.get("weight_block_size")
        if method == "fp8" and block is not None and list(block) != [128, 128]:
            raise NotImplementedError(
                f"{self.where}: weight_block_size={block}, must be [128, 128]"
            )
