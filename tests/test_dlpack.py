"""Hand-overs between torch and JAX: the same bits, what is shared, what is refused, what leaks."""

import contextlib
import gc
import resource
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import ON_GPU, bits, same_bits
from dgmoe_jax.interop import dlpack, to_jax, to_torch

DEVICE = "cuda" if ON_GPU else "cpu"
by_dtype = pytest.mark.parametrize("name", dlpack.DTYPES)
on_gpu = pytest.mark.skipif(not ON_GPU, reason="streams need a GPU")


def every_byte(name, *, shape=(64, 128)):
    """A tensor that holds every bit pattern of 8 bits, NaNs included."""
    size = 1 if name == "bool" else getattr(torch, name).itemsize
    values = torch.arange(shape[0] * shape[1] * size, dtype=torch.int32) * 37 % 256
    values = values % 2 if name == "bool" else values
    values = values.to(torch.uint8).view(getattr(torch, name)).reshape(shape)
    return values.to(DEVICE).clone()  # aligned


def torch_bits(tensor):
    tensor = tensor.cpu().contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy()


def equal_bits(array, tensor):
    assert array.shape == tuple(tensor.shape)
    assert jnp.dtype(array.dtype).name == str(tensor.dtype).removeprefix("torch.")
    got = np.frombuffer(np.ascontiguousarray(np.asarray(array)).tobytes(), np.uint8)
    np.testing.assert_array_equal(got, torch_bits(tensor))


def address(array):
    return array.unsafe_buffer_pointer()


@by_dtype
def test_both_ways_share_memory_and_keep_every_bit(name):
    tensor = every_byte(name)
    array = to_jax(tensor)
    equal_bits(array, tensor)
    assert address(array) == tensor.data_ptr()
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr() and back.dtype == tensor.dtype
    equal_bits(array, back)
    made = jax.block_until_ready(jax.jit(lambda a: a[::-1])(array))
    given = to_torch(made)
    assert given.data_ptr() == address(made)
    equal_bits(made, given)


@by_dtype
def test_a_copy_shares_nothing(name):
    tensor = every_byte(name)
    before = torch_bits(tensor).copy()
    array, copied = to_jax(tensor, copy=True), to_torch(to_jax(tensor), copy=True)
    assert len({address(array), copied.data_ptr(), tensor.data_ptr()}) == 3
    tensor.view(torch.uint8).fill_(1)
    for found in (copied, to_torch(array)):
        np.testing.assert_array_equal(torch_bits(found), before)


def test_writing_on_one_side_shows_on_the_other():
    """What "shared" means, for those who must know: not that anyone should."""
    tensor = torch.zeros(256, device=DEVICE)
    array = to_jax(tensor)
    tensor[3] = 7.0
    if ON_GPU:
        torch.cuda.synchronize()
    assert np.asarray(array)[3] == 7.0
    array = jnp.zeros(256) + 0
    to_torch(array)[3] = 7.0
    if ON_GPU:
        torch.cuda.synchronize()
    # A fresh view: a jax.Array may remember its value on the host.
    assert to_torch(array)[3] == 7.0


BASE = (65, 128)
VIEWS = {
    "transposed": lambda t: t.t(),
    "every other row": lambda t: t[::2],
    "columns": lambda t: t[:, 32:64],
    "one column": lambda t: t[:, :1],
    "expanded": lambda t: t[:1].expand(4, -1),
    "permuted": lambda t: t.reshape(5, 13, 128).permute(1, 0, 2),
    "off by one": lambda t: t.reshape(-1)[1:],
}
SHARED_VIEWS = {
    "rows": lambda t: t[32:],
    "one row": lambda t: t[:1],
    "nothing": lambda t: t[:0],
    "one element": lambda t: t[0, 0],
    "size 1, any stride": lambda t: torch.as_strided(t, (1, 8), (77, 1)),
    "size 1, last": lambda t: torch.as_strided(t, (8, 1), (1, 5)),
    "size 1, between": lambda t: torch.as_strided(t, (4, 1, 8), (8, 3, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int32"])
def test_what_cannot_be_shared_is_refused_and_copied_right(name, view):
    tensor = VIEWS[view](every_byte(name, shape=BASE))
    with pytest.raises(ValueError, match=r"strides|aligned.*copy=True"):
        to_jax(tensor)
    equal_bits(to_jax(tensor, copy=True), tensor)


@pytest.mark.parametrize("view", SHARED_VIEWS)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_contiguous_views_are_shared_whatever_the_stride_of_a_size_1(name, view):
    tensor = SHARED_VIEWS[view](every_byte(name, shape=BASE))
    array = to_jax(tensor)
    equal_bits(array, tensor)
    equal_bits(jax.jit(lambda a: a[...])(array), tensor)
    back = to_torch(array)
    assert back.is_contiguous()
    if tensor.numel():
        assert address(array) == tensor.data_ptr() == back.data_ptr()


def test_an_array_in_another_order_keeps_its_values():
    array = jnp.arange(24.0).reshape(4, 6)
    same_bits(to_torch(array.T).cpu().numpy(), np.asarray(array).T)


def test_the_negative_bit_is_not_lost():
    negated = torch._neg_view(torch.arange(64.0, device=DEVICE))
    assert negated.is_neg() and negated.is_contiguous()
    with pytest.raises(ValueError, match="negative bit"):
        to_jax(negated)
    same_bits(to_jax(negated, copy=True), negated.resolve_neg().cpu().numpy())


REFUSED = {
    "int64": lambda: torch.zeros(4, dtype=torch.int64),
    "float64": lambda: torch.zeros(4, dtype=torch.float64),
    "complex64": lambda: torch.zeros(4, dtype=torch.complex64),
    "float4_e2m1fn_x2": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "must be a torch.Tensor": lambda: np.zeros(4),
    "detach": lambda: torch.zeros(4, requires_grad=True),
    "sparse": lambda: torch.zeros(4, 4).to_sparse(),
    "meta": lambda: torch.zeros(4, device="meta"),
    "nested": lambda: torch._nested_tensor_from_tensor_list([torch.zeros(3, 4), torch.zeros(2, 4)]),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_torch_has_and_jax_lacks_is_refused_by_name(says):
    with pytest.raises((TypeError, ValueError), match=says):
        to_jax(REFUSED[says]())


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match=r"ndarray, must be a jax\.Array"):
        to_torch(np.zeros(4))
    with pytest.raises(TypeError, match="traced"):
        jax.jit(to_torch)(jnp.zeros(4))
    with pytest.raises(TypeError, match=r"array: dtype key<.*, must be in"):
        to_torch(jax.random.key(0))
    with pytest.raises(TypeError, match="float4_e2m1fn"):
        to_torch(jnp.zeros(4, jnp.float4_e2m1fn))
    gone = jnp.zeros(4)
    gone.delete()
    with pytest.raises(ValueError, match="deleted"):
        to_torch(gone)


def test_each_side_keeps_the_memory_of_the_other_alive():
    tensor = every_byte("float32")
    want, storage = tensor.cpu().clone(), weakref.ref(tensor.untyped_storage())
    array = to_jax(tensor)
    del tensor
    gc.collect()
    assert storage() is not None
    same_bits(array, want.numpy())
    del array
    gc.collect()
    assert storage() is None

    array = jnp.arange(4096.0) * 3
    tensor = to_torch(array)[5:9]
    array.delete()
    del array
    [jnp.full(4096, 9.0).block_until_ready() for _ in range(8)]
    assert tensor.tolist() == [15.0, 18.0, 21.0, 24.0]


def test_donating_what_torch_gave_donates_its_memory_on_a_gpu():
    tensor = torch.zeros(1024, device=DEVICE)
    result = jax.jit(lambda a: a + 1, donate_argnums=0)(to_jax(tensor)).block_until_ready()
    assert result[0] == 1 and tensor.unique().tolist() == [1.0 if DEVICE == "cuda" else 0.0]


def test_donating_what_torch_was_given_leaves_it_alone():
    array = jnp.zeros(1024) + 0
    tensor = to_torch(array)
    donating = jax.jit(lambda a: a + 1, donate_argnums=0)
    refused = pytest.raises(jax.errors.JaxRuntimeError, match="external reference")
    with refused if DEVICE == "cuda" else contextlib.nullcontext():
        donating(array).block_until_ready()
    assert not tensor.any()


def slow(array):
    """Busy for some time after the call has returned."""
    step = lambda _, c: jnp.tanh(c @ array * 1e-2 + array)  # noqa: E731
    return jax.lax.fori_loop(0, 200 if ON_GPU else 40, step, array)


SIZE = 2048 if ON_GPU else 400


def test_what_was_copied_may_be_written_at_once():
    """The copy rule: torch goes on where JAX has read; without a copy it may be too early."""
    source = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    run = jax.jit(slow)
    want = np.asarray(run(to_jax(source)))
    for _ in range(3):
        given = source.clone()
        if ON_GPU:  # torch's stream is busy before, and writes right after
            for _ in range(20):
                given = (given @ torch.eye(SIZE, device=DEVICE)).sub_(given).add_(source)
        expected = np.asarray(run(to_jax(given, copy=True))) if ON_GPU else want
        result = run(to_jax(given, copy=True))
        given.fill_(torch.nan)
        del given
        torch.full((SIZE, SIZE), torch.nan, device=DEVICE)
        same_bits(result, expected)


def test_what_follows_a_result_may_write_what_was_shared():
    source = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    run = jax.jit(slow)
    want = np.asarray(run(to_jax(source, copy=True)))
    given = source.clone()
    result = to_torch(run(to_jax(given)))
    given.fill_(torch.nan)
    same_bits(result.cpu().numpy(), want)


@on_gpu
def test_jax_does_not_reuse_what_torch_still_reads():
    """A tensor from JAX is dropped while torch's stream is at work on it."""
    busy = torch.randn(4096, 4096, device=DEVICE)
    fill = jax.jit(lambda v: jnp.full((1024, 1024), v))
    for _ in range(20):
        tensor = to_torch(fill(1.0))
        for _ in range(8):
            busy = torch.tanh(busy @ busy)
        total = tensor.sum()
        del tensor
        others = [fill(2.0) for _ in range(8)]
        assert total.item() == 1024 * 1024
        del others


@on_gpu
def test_another_stream_and_a_capturing_one():
    side = torch.cuda.Stream()
    run = jax.jit(lambda a: a * 2)
    with torch.cuda.stream(side):
        tensor = torch.ones(SIZE, SIZE, device=DEVICE)
        for _ in range(50):
            tensor = tensor @ torch.eye(SIZE, device=DEVICE)
        doubled = to_torch(run(to_jax(tensor)))
        assert (doubled == 2).all()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = torch.ones(64, device=DEVICE)
        with pytest.raises(RuntimeError, match="captured into a CUDA graph"):
            to_jax(captured)


def test_a_thousand_hand_overs_leak_nothing():
    size = 2**18
    tensor, array = torch.zeros(size, device=DEVICE), jnp.zeros(size) + 0

    def hand_over(count):
        for _ in range(count):
            to_torch(to_jax(tensor)), to_jax(to_torch(array))
            to_torch(to_jax(tensor, copy=True), copy=True)
        gc.collect()
        if ON_GPU:
            torch.cuda.synchronize()
            to_torch(jnp.zeros(1))  # lets go of what was dropped

    def held():
        live = len(jax.live_arrays()), len(dlpack._given)
        if ON_GPU:
            return (*live, torch.cuda.memory_allocated())
        return live

    hand_over(20)
    before, resident = held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hand_over(1000)
    after, grown = held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    assert all(b - a <= 2 for a, b in zip(before, after, strict=True)), (before, after)
    # 1,000 copies each way would be 2 GiB.
    assert ON_GPU or grown < 200 * 1024, f"{grown} KiB"
    assert not bits(array).any()
