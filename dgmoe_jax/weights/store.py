"""Prepared parameters in one safetensors file, so that preparation is paid once."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dgmoe_jax import checks
from dgmoe_jax.config import MoEConfig, OAISwiGLU, RouterConfig, SiLU, SiTU
from dgmoe_jax.recipes import Format
from dgmoe_jax.types import ExpertWeights, MoEParams, Scaled
from dgmoe_jax.weights.tensors import open_file

VERSION = "1"
"""Of the file: another number wherever the layout of prepared parameters changes."""

_CLASSES = {
    cls.__name__: cls
    for cls in (
        *(MoEConfig, RouterConfig, SiLU, OAISwiGLU, SiTU),
        *(MoEParams, ExpertWeights, Scaled, Format),
    )
}
_ANYWHERE = ("layout", "backend")  # fields of a config that prepared parameters do not depend on


def save(path: str | os.PathLike, cfg: MoEConfig, params: MoEParams) -> None:
    """Writes `params`, bit for bit, and `cfg` to one safetensors file.

    All of it passes through host memory at once. The file appears under its name when it is whole.

    Raises:
      ValueError, TypeError: `params` that were not prepared for `cfg`.
    """
    checks.instance("cfg", cfg, MoEConfig, "")
    checks.instance("params", params, MoEParams, "from prepare_params(raw, cfg)")
    checks.params(params, cfg)
    arrays: dict[str, np.ndarray] = {}
    metadata = {
        "dgmoe_jax": VERSION,
        "cfg": json.dumps(_to_json(cfg)),
        "params": json.dumps(_to_json(params, arrays)),
    }
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(arrays, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike, cfg: MoEConfig | None = None) -> tuple[MoEConfig, MoEParams]:
    """What `save` wrote -> `(cfg, params)`.

    Args:
      cfg: what the file must have been prepared for, `layout` and `backend` aside, which are the
        caller's and come back; None: whatever it says.

    Raises:
      FileNotFoundError, ValueError: no file, a damaged one, one of another version or not of
        `save`'s, one for another config; the text names the file and what was expected.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing")
    tensors, metadata = open_file(path)
    version = metadata.get("dgmoe_jax")
    if version != VERSION:
        kind = "not written by dgmoe_jax.save" if version is None else f"version {version}"
        raise ValueError(f"{path}: {kind}, expected version {VERSION}: prepare and save again")
    try:
        stored = _from_json(json.loads(metadata["cfg"]))
        params = _from_json(json.loads(metadata["params"]), tensors)
        checks.instance("cfg", stored, MoEConfig, "")
        checks.instance("params", params, MoEParams, "")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not as version {VERSION} is written: {error}") from error
    if cfg is not None:
        stored = dataclasses.replace(stored, **{name: getattr(cfg, name) for name in _ANYWHERE})
        differ = [
            f"{f.name}={getattr(stored, f.name)!r}, expected {getattr(cfg, f.name)!r}"
            for f in dataclasses.fields(cfg)
            if getattr(stored, f.name) != getattr(cfg, f.name)
        ]
        if differ:
            raise ValueError(f"{path}: prepared for {'; '.join(differ)}")
    try:
        checks.params(params, stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return stored, params


def _to_json(value: Any, arrays: dict[str, np.ndarray] | None = None, path: str = "") -> Any:
    """Dataclasses as {"class": name, fields}; arrays go into `arrays`, by the path to them."""
    if dataclasses.is_dataclass(value):
        fields = {
            f.name: _to_json(getattr(value, f.name), arrays, f"{path}.{f.name}".lstrip("."))
            for f in dataclasses.fields(value)
        }
        return {"class": _CLASSES[type(value).__name__].__name__, **fields}
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return value
    arrays[path] = np.ascontiguousarray(value)
    return {"array": path}


def _from_json(value: Any, tensors: dict[str, Any] | None = None) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        if value["array"] not in tensors:
            raise ValueError(f"no tensor {value['array']!r}")
        # A copy: JAX on a CPU may otherwise keep the mapped file as its buffer.
        return jnp.array(tensors[value["array"]].read(), copy=True)
    fields = {name: _from_json(x, tensors) for name, x in value.items() if name != "class"}
    return _CLASSES[value["class"]](**fields)
