"""One MoE block's tensors, stacked as `prepare_params` takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dgmoe_jax.quantize import dequantize
from dgmoe_jax.recipes import BF16, FP8_128X128, MXFP4_1X32, MXFP8_1X32, Format
from dgmoe_jax.types import Scaled
from dgmoe_jax.weights.families import LAYERS, Matrices, Names
from dgmoe_jax.weights.tensors import Checkpoint, Tensor

Shape = tuple[int, ...]

FLOATS = ("bfloat16", "float16", "float32")
_EXPONENTS = ("uint8", "float8_e8m0fnu")
_FP8 = ("float8_e4m3fn",)


@dataclass(frozen=True)
class Encoding:
    """How a checkpoint stores a matrix, and the recipe that reads it so.

    dtypes, scale_dtypes: that its values and its scales may have; no scales where empty.
    per_tensor: one scale for the whole matrix, which becomes that of every group.
    """

    recipe: str
    format: Format
    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...] = ()
    per_tensor: bool = False


ENCODINGS = (
    Encoding("bf16", BF16, FLOATS),
    Encoding("fp8_block", FP8_128X128, _FP8, ("float32", "bfloat16", "float8_e8m0fnu")),
    Encoding("fp8_block", FP8_128X128, _FP8, ("float32", "bfloat16"), per_tensor=True),
    Encoding("mxfp8", MXFP8_1X32, _FP8, _EXPONENTS),
    Encoding("mxfp4", MXFP4_1X32, ("uint8", "int8"), _EXPONENTS),
)

# Where gate's and up's rows lie in a tensor of both, by `Matrices.rows`; n rows each.
_ROWS: dict[str, tuple[Callable[[int], slice], ...]] = {
    "halves": (lambda n: slice(None, n), lambda n: slice(n, None)),
    "interleaved": (lambda n: slice(0, None, 2), lambda n: slice(1, None, 2)),
}


@dataclass(frozen=True)
class Part:
    """Gate, up or down (`index` 0, 1, 2), [n, k] of each expert, and the tensors it lies in."""

    matrices: Matrices
    index: int
    n: int
    k: int
    experts: int

    @property
    def rows(self) -> str | None:
        return self.matrices.rows if self.index < 2 else None

    def name(self, expert: int, ending: str | None = None) -> str:
        return self.matrices.name(self.index, expert, ending)

    def groups(self, e: Encoding) -> tuple[int, int]:
        return -(-self.n // e.format.group[0]), -(-self.k // e.format.group[1])

    def _shape(self, rows: int, columns: int, cut: int | None = None) -> Shape:
        rows = 2 * rows if self.rows else rows
        shape = (rows, columns // cut, cut) if cut else (rows, columns)
        shape = shape[::-1] if self.matrices.transposed else shape
        return (self.experts, *shape) if self.matrices.stacked else shape

    def value_shape(self, e: Encoding) -> Shape:
        return self._shape(self.n, self.k // e.format.packed, self.matrices.cut)

    def scale_shapes(self, e: Encoding) -> tuple[Shape, ...]:
        return ((), (1,)) if e.per_tensor else (self._shape(*self.groups(e)),)

    def take(self, array: np.ndarray, expert: int, rows: int) -> np.ndarray:
        """`rows` rows of one expert: a view of the tensor that holds them."""
        array = array[expert] if self.matrices.stacked else array
        array = array.T if self.matrices.transposed else array
        if not self.rows:
            return array.reshape(rows, -1)
        return array.reshape(2 * rows, -1)[_ROWS[self.rows][self.index](rows)]

    def describe(self, encodings: Iterable[Encoding]) -> str:
        def one(e: Encoding) -> str:
            values = _expected(e.dtypes, (self.value_shape(e),))
            if not e.scale_dtypes:
                return values
            return f"{values} with scales {_expected(e.scale_dtypes, self.scale_shapes(e))}"

        return "; ".join(map(one, encodings))


def _expected(dtypes: Iterable[str], shapes: Iterable[Shape]) -> str:
    return f"{' or '.join(dtypes)} {' or '.join(map(str, shapes))}"


class Reader:
    """One layer's tensors by the model's names for them, and an account of those that were read.

    Its methods raise ValueError, FileNotFoundError and NotImplementedError that name the file, the
    tensor and what was expected.
    """

    def __init__(
        self, tensors: Checkpoint, choices: tuple[Names, ...], layer: int, num_experts: int
    ):
        self.tensors, self.num_experts = tensors, num_experts
        self._read: set[str] = set()
        ways = [
            (names, prefix.format(layer=layer) + names.block)
            for names in choices
            for prefix in LAYERS
        ]
        # By all experts' names: a damaged checkpoint may lack any one of them.
        self.names, self.prefix = max(ways, key=lambda way: self._present(*way))
        if not self._present(self.names, self.prefix):
            first = ways[0][1] + ways[0][0].experts.name(0, 0)
            raise ValueError(
                f"{tensors.where}: no experts of layer {layer}, expected names like {first!r}"
            )

    def _present(self, names: Names, prefix: str) -> int:
        wanted = {
            prefix + names.experts.name(part, expert)
            for part in range(3)
            for expert in range(self.num_experts)
        }
        return len(wanted & self.tensors.names)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors.names

    def where(self, name: str) -> str:
        """The file and the whole name, for messages."""
        name = self.prefix + name
        return f"{self.tensors.get(name, 'a tensor').where}: {name}"

    def tensor(self, name: str, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> Tensor:
        """The tensor `name`, of one of these shapes and dtypes."""
        expected = _expected(dtypes, shapes)
        found = self.tensors.get(self.prefix + name, expected)
        if found.shape not in shapes or found.dtype not in dtypes:
            raise ValueError(
                f"{self.where(name)}: {found.dtype} {found.shape}, expected {expected}"
            )
        self._read.add(self.prefix + name)
        return found

    def array(self, name: str, shape: Shape, dtypes: tuple[str, ...] = FLOATS) -> np.ndarray:
        """A copy: JAX on a CPU may otherwise keep the mapped file as its buffer."""
        return np.array(self.tensor(name, (shape,), dtypes).read())

    def recipe(self, matrices: Matrices, experts: int, hidden: int, inner: int) -> str:
        """The recipe that a block's matrices, of these sizes, are stored for."""
        gate, _, down = _parts(matrices, experts, hidden, inner)
        stored, of_w2 = (self._encoding(part)[0].recipe for part in (gate, down))
        if of_w2 != stored:
            raise ValueError(
                f"{self.where(down.name(0))}: stored for recipe {of_w2!r}, expected {stored!r} as"
                f" {self.prefix + gate.name(0)}"
            )
        return stored

    def block(
        self,
        matrices: Matrices,
        experts: int,
        hidden: int,
        inner: int,
        recipe: str,
        advance: Callable[[int], None] = lambda count: None,
    ) -> dict[str, np.ndarray]:
        """`w13` [experts, 2 * inner, hidden], `w2` and, where they have any, their scales; without
        scales in bf16 where they are stored for another recipe."""
        gate, up, down = _parts(matrices, experts, hidden, inner)
        out = {}
        for name, parts in (("w13", (gate, up)), ("w2", (down,))):
            e, ending = self._encoding(parts[0])
            keep = ending is None or e.recipe == recipe
            out[name], scales = self._stack(parts, e, ending, keep, advance)
            if scales is not None:
                out[f"{name}_scale"] = scales
        return out

    def _encoding(self, part: Part) -> tuple[Encoding, str | None]:
        """How the first expert's matrix is stored, and how its scale's name ends."""
        values = self.tensors.get(self.prefix + part.name(0), part.describe(ENCODINGS))
        endings = part.matrices.scales
        ending = next((s for s in endings if self.has(part.name(0, s))), None)
        of_dtype = [e for e in ENCODINGS if values.dtype in e.dtypes]
        found = [e for e in of_dtype if bool(e.scale_dtypes) == (ending is not None)]
        if not found:
            names = " or ".join(self.prefix + part.name(0, s) for s in endings)
            raise ValueError(
                f"{self.where(part.name(0))}: {values.dtype} {values.shape}"
                f" {f'with a scale {ending}' if ending else f'without a scale {names}'},"
                f" expected {part.describe(of_dtype or ENCODINGS)}"
            )
        if ending is None:
            return found[0], None
        scale = self.tensors.get(self.prefix + part.name(0, ending), "scales")
        for e in found:
            if scale.dtype in e.scale_dtypes and scale.shape in part.scale_shapes(e):
                break
        else:
            expected = "; ".join(_expected(e.scale_dtypes, part.scale_shapes(e)) for e in found)
            raise ValueError(
                f"{self.where(part.name(0, ending))}: {scale.dtype} {scale.shape},"
                f" expected {expected}"
            )
        rows = e.format.group[0]
        if part.rows and rows > 1 and (part.n % rows or part.rows != "halves"):
            raise NotImplementedError(
                f"{self.where(part.name(0, ending))}: a scale of {rows} rows, some of gate and some"
                f" of up, which have {part.n} rows each ({part.rows})"
            )
        return e, ending

    def _stack(
        self,
        parts: tuple[Part, ...],
        e: Encoding,
        ending: str | None,
        keep: bool,
        advance: Callable[[int], None],
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Values and scales of the parts, one after another, expert by expert."""
        # Of one dtype all: the stack has only one, and must not convert in silence.
        dtype = self.tensors.get(self.prefix + parts[0].name(0), "weights").dtype
        values = scales = None
        for expert in range(parts[0].experts):
            found = [self._matrix(part, expert, e, dtype, ending) for part in parts]
            if not keep:
                found = [(_as_bf16(v, s, e.format), None) for v, s in found]
            values = _put(values, expert, [v for v, _ in found], parts[0].experts)
            if found[0][1] is not None:
                scales = _put(scales, expert, [s for _, s in found], parts[0].experts)
            advance(1)
        return values, scales

    def _matrix(
        self, part: Part, expert: int, e: Encoding, dtype: str, ending: str | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        values = self.tensor(part.name(expert), (part.value_shape(e),), (dtype,)).read()
        values = part.take(values, expert, part.n)
        values = values.view(np.uint8) if dtype == "int8" else values
        if ending is None:
            return values, None
        name = part.name(expert, ending)
        scales = self.tensor(name, part.scale_shapes(e), e.scale_dtypes).read()
        if e.per_tensor:
            return values, np.full(part.groups(e), scales.reshape(()), np.float32)
        scales = part.take(scales, expert, part.groups(e)[0])
        exponents = e.scale_dtypes == _EXPONENTS
        return values, scales.view(np.uint8) if exponents else scales.astype(np.float32)

    def check_biases(self) -> None:
        """What is no correction bias of the choice is part of a product: zeros, or refused."""
        names = [name for name in self._names() if name.endswith("bias")]
        names = [name for name in names if name != f"{self.prefix}{self.names.bias}"]
        self._read.update(names)
        given = [name for name in names if np.any(self.tensors.get(name, "a bias").read())]
        if given:
            raise NotImplementedError(
                f"{self.tensors.get(given[0], 'a bias').where}: {given}: experts and router logits"
                " have no bias here, so these must be zeros"
            )

    def check_all_read(self) -> None:
        """Nothing of the block is dropped but scales of activations."""
        left = [name for name in self._names() if name not in self._read]
        left = [name for name in left if not name.endswith("input_scale")]
        if left:
            raise ValueError(
                f"{self.tensors.get(left[0], 'a tensor').where}: {len(left)} tensors that nothing"
                f" reads, {left[:4]}; expected those of {self.num_experts} experts, and what"
                " config.json says"
            )

    def _names(self) -> list[str]:
        return sorted(name for name in self.tensors.names if name.startswith(self.prefix))


def _parts(matrices: Matrices, experts: int, hidden: int, inner: int) -> tuple[Part, Part, Part]:
    gate, up = (Part(matrices, index, inner, hidden, experts) for index in (0, 1))
    return gate, up, Part(matrices, 2, hidden, inner, experts)


def _put(
    stack: np.ndarray | None, expert: int, arrays: list[np.ndarray], experts: int
) -> np.ndarray:
    rows = sum(len(x) for x in arrays)
    if stack is None:
        stack = np.empty((experts, rows, *arrays[0].shape[1:]), arrays[0].dtype)
    np.concatenate(arrays, out=stack[expert])
    return stack


def _as_bf16(values: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    if scales.dtype == np.uint8:
        scales = scales.view(jnp.float8_e8m0fnu).astype(np.float32)
    return np.asarray(_dequantise(np.ascontiguousarray(values), scales, fmt))


@functools.partial(jax.jit, static_argnames="fmt")
def _dequantise(values: Array, scales: Array, fmt: Format) -> Array:
    return dequantize(Scaled(values, scales, fmt)).astype(jnp.bfloat16)
