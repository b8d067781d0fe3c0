"""Named tensors of a checkpoint: a folder of safetensors files, memory-mapped, or a mapping.

The safetensors library checks a file (header, offsets, length) but hands out neither float8 nor
e8m0 without torch, so the bytes are read here, through `numpy.memmap`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

# The format's codes by the names numpy has with ml_dtypes; others are named in errors as they are.
DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor, not read yet. where: the file that holds it, for errors."""

    where: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def open_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of one safetensors file, as views of the mapped file, and its metadata.

    Raises ValueError if the file is not a whole one.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    mapped = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    header.pop("__metadata__", None)

    def view(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> np.ndarray:
        return mapped[start + begin : start + end].view(jnp.dtype(dtype)).reshape(shape)

    tensors = {}
    for name, entry in header.items():
        dtype, shape = DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])
        read = functools.partial(view, dtype, shape, *entry["data_offsets"])
        tensors[name] = Tensor(str(path), dtype, shape, read)
    return tensors, metadata


class Checkpoint:
    """Tensors by name; `names` are all there are. A file is opened when one of its own is needed.

    Raises ValueError, FileNotFoundError: a folder without safetensors, a damaged index.
    """

    def __init__(self, source: str | Path | Mapping[str, Any]):
        self._open = functools.cache(lambda path: open_file(path)[0])
        if isinstance(source, Mapping):
            self.where, self.folder = "the mapping", None
            self._tensors, self._files = {name: _given(name, x) for name, x in source.items()}, {}
            self.names = self._tensors.keys()
            return
        self._tensors, self.folder = None, Path(source)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder}: must be a folder with config.json and {INDEX}")
        single, index = self.folder / SINGLE, self.folder / INDEX
        self.where = str(single if single.exists() else index)
        if single.exists():
            self._files = dict.fromkeys(self._open(single), single)
        elif index.exists():
            self._files = _indexed(index)
        else:
            raise FileNotFoundError(f"{self.folder}: has neither {SINGLE} nor {INDEX}")
        self.names = self._files.keys()

    def get(self, name: str, expected: str) -> Tensor:
        """The tensor `name`. Raises ValueError or FileNotFoundError, saying what was expected."""
        if name not in self.names:
            raise ValueError(f"{self.where}: no tensor {name!r}, expected {expected}")
        if self._tensors is not None:
            return self._tensors[name]
        path = self._files[name]
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: missing; {self.where} says it holds {name!r}, expected {expected}"
            )
        if name not in self._open(path):
            raise ValueError(
                f"{path}: no tensor {name!r}, expected {expected}; {self.where} says it is there"
            )
        return self._open(path)[name]


def _given(name: str, x: Any) -> Tensor:
    try:
        dtype, shape = jnp.dtype(x.dtype).name, tuple(x.shape)
    except (AttributeError, TypeError):
        raise TypeError(
            f"{name}: {type(x).__name__}, must be a numpy or JAX array"
            " (of a torch tensor: jnp.from_dlpack(tensor))"
        ) from None
    return Tensor("the mapping", dtype, shape, lambda: np.asarray(x))


def _indexed(index: Path) -> dict[str, Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
        raise ValueError(f"{index}: no 'weight_map', expected names of tensors and their files")
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside:
        raise ValueError(f"{index}: files {outside}, expected names of files beside it")
    return {name: index.parent / file for name, file in names.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ValueError, FileNotFoundError naming it."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing")
    try:
        content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {type(content).__name__}, expected a JSON object")
    return content
