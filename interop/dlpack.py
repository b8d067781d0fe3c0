"""Tensors between torch and JAX, where they lie: `to_jax` and `to_torch`, through DLPack.

Without `copy` both sides read one piece of memory, which lives until both have let go of it. JAX
takes its arrays for constants, and on a GPU the two run on streams of their own:

* Each hand-over orders the streams one way: what torch's current stream was given before `to_jax`
  is done before JAX reads, and what JAX was given before `to_torch` is done before torch's current
  stream goes on. On a CPU, `to_torch` waits.
* Nothing orders what comes later. A tensor given to JAX must be neither written nor freed until
  what reads it is done: `jax.block_until_ready`, or anything that follows the `to_torch` of a
  result that depends on it. `to_jax(tensor, copy=True)` lifts that: torch's stream waits for the
  copy, after which the tensor may be written or freed at once.
* A tensor that JAX gave is JAX's memory: writing to it changes the array. Dropping it is safe
  while the current stream still reads it; what other streams read must be awaited first.
* Donating (`donate_argnums`) an array that torch was given: JAX copies it on a CPU and refuses on a
  GPU. Donating one that came from torch gives torch's memory away on a GPU: donate what `copy=True`
  made.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxlib import _jax

if TYPE_CHECKING:
    import torch

DTYPES = (
    *("bfloat16", "float16", "float32", "int32", "int8", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)
"""What either side hands over, by the name that both have for it. FP4 goes as uint8, two a byte."""

ALIGNMENT = {"cpu": 64, "cuda": 16}
"""Bytes: XLA on a CPU copies what is aligned to less, and on a GPU refuses to run on it."""

TRIED_JAXLIB = jaxlib.__version__ in ("0.10.2", "0.11.2")
"""Whether this jaxlib is one that was tried. Then its functions below `jnp.from_dlpack` and
`__dlpack__` are called, for some 20 us less; with others the public ones."""

_DLPACK_KIND = {"cpu": 1, "cuda": 2}

_asked = itertools.count()  # of programs_stream: a target's name is registered once

_given: dict[int, tuple[weakref.ref, jax.Array]] = {}
"""Arrays whose memory is a tensor's, by the identity of what tells that its storage is gone."""

_dropped: collections.deque[tuple[Any, jax.Array]] = collections.deque()
"""Arrays whose tensors are gone, until the event after torch's last work on them has passed."""

_letting_go = threading.Lock()

_spare: dict[Any, list[Any]] = collections.defaultdict(list)
"""Events that have passed, by their device."""


def to_jax(tensor: torch.Tensor, *, copy: bool = False) -> jax.Array:
    """A torch tensor as a JAX array on the same device, the same bits.

    Args:
      tensor: of a dtype in `DTYPES`; without `copy`, contiguous (strides of dimensions of size 1
        are not looked at) and aligned to 64 bytes on a CPU, 16 on a GPU.
      copy: into memory of JAX's own, for any strides.

    Raises:
      TypeError: no tensor, or a dtype that has no counterpart (int64 would become int32).
      ValueError: memory that cannot be shared as it is; a tensor that requires grad; no CPU or GPU;
        a nested tensor.
      RuntimeError: the current stream is being captured into a CUDA graph.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: {type(tensor).__name__}, must be a torch.Tensor")
    _check_dtype("tensor", str(tensor.dtype).removeprefix("torch."))
    check_memory("tensor", tensor)
    if tensor.requires_grad:
        raise ValueError("tensor: requires grad, which ends here; pass tensor.detach()")
    why_not = _why_not_shared(tensor)
    if why_not and not copy:
        raise ValueError(f"tensor: {why_not}; copy=True copies it")
    array = share(shareable(tensor) if why_not else tensor)
    if copy:
        array = jnp.array(array, copy=True)
        to_torch(array)  # for the wait
    return array


def to_torch(array: jax.Array, *, copy: bool = False) -> torch.Tensor:
    """A JAX array as a torch tensor on the same device, the same bits; a GPU's is not awaited.

    Args:
      array: on one device, of a dtype in `DTYPES`.
      copy: into memory of torch's own, which may be written.

    Raises:
      TypeError: no array, or a dtype that has no counterpart; a value that is being traced.
      ValueError: a deleted or donated array, or one on several devices.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"array: {array}, is being traced; its values are known outside of jit only"
        )
    if not isinstance(array, jax.Array):
        raise TypeError(f"array: {type(array).__name__}, must be a jax.Array")
    extended = jnp.issubdtype(array.dtype, jax.dtypes.extended)  # of jax.random.key, no numbers
    _check_dtype("array", str(array.dtype) if extended else jnp.dtype(array.dtype).name)
    if array.is_deleted():
        raise ValueError("array: deleted or donated, must be alive")
    if len(array.devices()) != 1:
        raise ValueError(f"array: on {len(array.devices())} devices, must be on one")
    # Another array of the same memory, which outlives what `array.delete()` deletes.
    tensor = give(array.addressable_data(0), torch_device(*array.devices()))
    return tensor.clone() if copy else tensor


def give(array: jax.Array, device: torch.device) -> torch.Tensor:
    """`to_torch` of an array on `device` that is known to be one that can be handed over, and that
    nobody deletes."""
    import torch

    if device.type == "cpu":  # jaxlib 0.10 waits by itself, which the protocol does not ask for
        array.block_until_ready()
    if device.type == "cpu" or not TRIED_JAXLIB:
        tensor = torch.from_dlpack(array)
    else:
        stream = _current_stream(device).cuda_stream or 1
        capsule = _jax.buffer_to_dlpack_managed_tensor(array, stream=stream)
        tensor = torch.utils.dlpack.from_dlpack(capsule)
    if device.type == "cuda":
        # weakref.finalize does as much in several times the time.
        gone = weakref.ref(tensor.untyped_storage(), functools.partial(_drop, device))
        _given[id(gone)] = gone, array
        _let_go()  # while the GPU is busy with what made this array
    return tensor


def check_memory(owner: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is not one block of strided memory on a CPU or GPU."""
    import torch

    if tensor.is_nested:
        raise ValueError(f"{owner}: nested, must be one torch.strided tensor, such as each part is")
    if tensor.device.type not in ALIGNMENT or tensor.layout != torch.strided:
        raise ValueError(
            f"{owner}: {tensor.layout} on {tensor.device}, must be torch.strided on {[*ALIGNMENT]}"
        )


def share(tensor: torch.Tensor) -> jax.Array:
    """`to_jax` of a tensor that is known to be one that can be shared."""
    import torch

    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):  # whose current stream is the one meant
            return share(tensor)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tensor: the current stream is being captured into a CUDA graph, which JAX's work"
            " cannot enter; capture what lies before and after it"
        )
    if not TRIED_JAXLIB:
        return jnp.from_dlpack(tensor)
    _let_go()  # before what comes next takes other memory, for which XLA records its graphs again
    device, kind, stream = jax_device(tensor.device), _DLPACK_KIND[tensor.device.type], None
    if tensor.is_cuda and not _current_stream(tensor.device).query():
        # Only where there is something to wait for: with this and an event made for each tensor,
        # TorchMoE's calls in a row took 570 us each, and without 246 (one token, an H200).
        stream = device.get_stream_for_external_ready_events()
        _wait_for_torch(stream, tensor.device)
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, stream, None, kind)


def borrow(tensor: torch.Tensor) -> jax.Array:
    """`share`, for one program, which torch's current stream waits for while the tensor lives: what
    comes next there, use of its memory for others too, comes after it. So the array need not keep
    the memory, no more than torch's own kernels do (`record_stream` is for that of other streams).

    Then one array will do for all tensors at an address, and it is JAX's stream that waits. To make
    one and let it go took JAX's runtime some 90 us in a trial (jaxlib 0.11.2, an H200).
    """
    import torch

    device = tensor.device
    if (
        not tensor.is_cuda
        or not tensor.numel()
        or device.index != torch.cuda.current_device()
        or torch.cuda.is_current_stream_capturing()
    ):
        return share(tensor)
    if not _current_stream(device).query():
        stream = programs_stream(device)
        if stream is None:
            return share(tensor)
        _wait_for_torch(stream, device)
    return _view(tensor.data_ptr(), tensor.shape, tensor.dtype, device)


def _wait_for_torch(stream: int, device: torch.device) -> None:
    """What JAX puts into `stream` from now on comes after what torch's current one has."""
    waiting, event = _waiting(device, stream, threading.get_ident())
    event.record()
    waiting.wait_event(event)


@functools.cache
def programs_stream(device: torch.device) -> int | None:
    """The stream that JAX runs its programs on, on a GPU; None where none tells.

    A small program tells, by calling Python. There is one a device (jaxlib 0.10.2, 0.11.2).
    """
    try:
        import jax_tvm_ffi
        import tvm_ffi
    except ImportError:
        return None
    if not TRIED_JAXLIB:
        return None
    name, told = f"dgmoe_jax.stream_{next(_asked)}", []

    def tell(*_):
        told.append(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.index)))

    jax_tvm_ffi.register_ffi_target(name, tvm_ffi.convert(tell), ["args", "rets"], platform="gpu")
    there = jax.device_put(np.zeros(1, np.int32), jax_device(device))  # and on no other
    ask = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1,), jnp.int32), has_side_effect=True)
    jax.block_until_ready(jax.jit(ask)(there))
    (stream,) = told
    return stream or None  # 0: none was set


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """As torch names it. To make its object took 9 us on an H200's host, to look it up 1."""
    import torch

    # Not public, though Triton launches by it: torch 2.11 and 2.13 have it.
    number = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if number is None:
        return torch.cuda.current_stream(device)
    return _stream(number(device.index), device)


@functools.lru_cache(64)
def _stream(number: int, device: torch.device) -> torch.cuda.Stream:
    """The current stream, whose number this is. torch's own live as long as the process."""
    import torch

    return torch.cuda.current_stream(device)


@functools.lru_cache(256)
def _view(address: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> jax.Array:
    """Of memory that others keep alive."""
    import torch

    memory = torch.as_tensor(_Memory(address, math.prod(shape) * dtype.itemsize), device=device)
    if memory.data_ptr() != address:
        raise RuntimeError(f"torch {torch.__version__} copied memory that it was to view")
    return share(memory.view(dtype).view(shape))


class _Memory:
    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address, False),
        }


@functools.lru_cache(64)
def _waiting(device: torch.device, stream: int, thread: int) -> tuple[Any, Any]:
    """JAX's stream as torch sees it, and an event of the thread's own to make it wait with."""
    import torch

    return torch.cuda.ExternalStream(stream, device), torch.cuda.Event()


@functools.cache
def torch_device(device: jax.Device) -> torch.device:
    """torch's name for a device of JAX's."""
    import torch

    if device.platform == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device.local_hardware_id)


@functools.cache
def jax_device(device: torch.device) -> jax.Device:
    """JAX's name for torch's device. Raises ValueError where JAX does not run on it."""
    try:
        found = jax.local_devices(backend={"cuda": "gpu"}.get(device.type, device.type))
    except RuntimeError:
        found = []
    for d in found:
        if device.type == "cpu" or d.local_hardware_id == device.index:
            return d
    raise ValueError(f"device {device}: JAX does not run on it, only on {jax.local_devices()}")


def shareable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous, aligned copy of it on torch's current stream."""
    import torch

    if _why_not_shared(tensor):
        return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor


def _why_not_shared(tensor: torch.Tensor) -> str | None:
    if not tensor.is_contiguous():
        return f"strides {tensor.stride()} of shape {tuple(tensor.shape)} are not contiguous"
    if tensor.is_neg():
        return "its values are those of its memory negated (torch's negative bit)"
    alignment = ALIGNMENT[tensor.device.type]
    if tensor.data_ptr() % alignment:
        return f"its memory starts {tensor.data_ptr() % alignment} bytes past {alignment} aligned"
    return None


def _check_dtype(owner: str, name: str) -> None:
    if name not in DTYPES:
        raise TypeError(f"{owner}: dtype {name}, must be in {DTYPES}")


def _let_go() -> None:
    if not _letting_go.acquire(blocking=False):  # another thread is at it
        return
    try:
        while _dropped and _dropped[0][0].query():
            event, _ = _dropped.popleft()
            _spare[event.device].append(event)
    finally:
        _letting_go.release()


def _drop(device: torch.device, gone: weakref.ref) -> None:
    """JAX would give the memory to its next program, on a stream that knows nothing of torch's."""
    import torch

    if sys.is_finalizing():
        return
    _, array = _given.pop(id(gone))
    if torch.cuda.is_current_stream_capturing():  # an event of a graph's cannot be asked
        return
    try:
        event = _spare[device].pop()
    except IndexError:
        event = torch.cuda.Event()
    event.record(_current_stream(device))
    _dropped.append((event, array))
