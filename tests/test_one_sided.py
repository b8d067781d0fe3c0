"""Rows between the GPUs of an axis: exact on several GPUs, and what a CPU can see of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dgmoe_jax.kernels_pallas import one_sided
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

RANKS = jax.device_count()
REASON = one_sided.unavailable(jax.devices())
needs_gpus = pytest.mark.skipif(REASON is not None, reason=str(REASON))
DTYPES = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
SPEC = PartitionSpec("x")


def sharded(fn, mesh=None):
    """fn of every rank's share, jitted; arrays are [R * .., ..]."""
    mesh = mesh or Mesh(np.array(jax.devices()), ("x",))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False))


@functools.cache
def exchange_of(capacity, ranks=RANKS):
    """Jitted, so that a program of many calls lowers one kernel."""
    return jax.jit(
        functools.partial(one_sided.exchange, axis_name="x", ranks=ranks, capacity=capacity)
    )


def random_rows(rng, n, width, dtype):
    """[R * n, width] of random bits: NaN and -0.0 must arrive as they are, too."""
    size = jnp.dtype(DTYPES[dtype]).itemsize
    bits = rng.integers(0, 256, (RANKS * n, width * size), np.uint8)
    return bits.view(jnp.dtype(DTYPES[dtype]))


def as_bytes(array):
    return np.ascontiguousarray(array).view(np.uint8)


def sends(rng, wanted, capacity):
    """wanted [R, N, R] bool (rank, row, peer) -> src2dst [R * N, R], counts [R * R]; positions in
    random order, destinations in random columns."""
    ranks, n, _ = wanted.shape
    src2dst = np.full((ranks, n, ranks), -1, np.int32)
    for rank in range(ranks):
        for peer in range(ranks):
            (chosen,) = np.nonzero(wanted[rank, :, peer])
            src2dst[rank, chosen, peer] = peer * capacity + rng.permutation(len(chosen))
    src2dst = rng.permuted(src2dst, axis=2)
    return src2dst.reshape(-1, ranks), wanted.sum(1).astype(np.int32).reshape(-1)


def check(received, rows, src2dst, capacity):
    """Against a copy of row by row; received [R * R * capacity, W]."""
    width = rows.shape[1]
    got = as_bytes(received).reshape(RANKS, RANKS * capacity, -1)
    rows = as_bytes(rows).reshape(RANKS, -1, got.shape[2])
    want, sent = np.zeros_like(got), np.zeros(got.shape[:2], bool)
    for rank, share in enumerate(src2dst.reshape(RANKS, rows.shape[1], -1)):
        for n, j in np.argwhere(share >= 0):
            peer, at = divmod(share[n, j], capacity)
            want[peer, rank * capacity + at] = rows[rank, n]
            sent[peer, rank * capacity + at] = True
    np.testing.assert_array_equal(got[sent], want[sent])
    mark = one_sided.UNIT * got.shape[2] // width
    assert (got[~sent][:, -mark:] == 0xFF).all()


WANTED = {
    "uneven": lambda rng, n: rng.random((RANKS, n, RANKS)) < rng.random((RANKS, 1, RANKS)),
    "all to all": lambda rng, n: np.ones((RANKS, n, RANKS), bool),
    "nothing": lambda rng, n: np.zeros((RANKS, n, RANKS), bool),
    "one rank sends nothing": lambda rng, n: np.broadcast_to(
        np.arange(RANKS)[:, None, None] != 1, (RANKS, n, RANKS)
    ),
    "all to one": lambda rng, n: np.broadcast_to(np.arange(RANKS) == RANKS - 1, (RANKS, n, RANKS)),
    "one each": lambda rng, n: np.eye(RANKS, dtype=bool)[rng.integers(0, RANKS, (RANKS, n))],
}


@needs_gpus
@every_dtype
@pytest.mark.parametrize("kind", WANTED)
@pytest.mark.parametrize("n, width, more", [(1, 128, 0), (17, 384, 3), (300, 7552, 0)])
def test_every_row_arrives(dtype, kind, n, width, more):
    rng, capacity = np.random.default_rng(n), n + more
    rows = random_rows(rng, n, width, dtype)
    src2dst, counts = sends(rng, WANTED[kind](rng, n), capacity)
    if kind == "one each":  # as on the way back
        src2dst = src2dst.max(axis=1, keepdims=True)
    check(sharded(exchange_of(capacity))(rows, src2dst, counts), rows, src2dst, capacity)


@needs_gpus
@every_dtype
def test_many_turns_of_the_ring(dtype):
    rng, n = np.random.default_rng(0), 5000
    rows = random_rows(rng, n, 1024, dtype)
    src2dst, counts = sends(rng, WANTED["uneven"](rng, n), n)
    check(sharded(exchange_of(n))(rows, src2dst, counts), rows, src2dst, n)


@needs_gpus
@pytest.mark.parametrize("unrolled", [False, True])
def test_calls_in_one_program(unrolled):
    """200 of them, back to back, each with data of its own."""
    calls, n, width = 200, 24, 256
    rng = np.random.default_rng(1)
    rows = np.stack([random_rows(rng, n, width, "bf16") for _ in range(calls)], 1)
    plans = [sends(rng, WANTED["uneven"](rng, n), n) for _ in range(calls)]
    src2dst, counts = (np.stack(x, 1) for x in zip(*plans, strict=True))

    def run(rows, src2dst, counts):
        inputs = [jnp.moveaxis(x, 1, 0) for x in (rows, src2dst, counts)]
        if unrolled:
            out = jnp.stack([exchange_of(n)(*(x[i] for x in inputs)) for i in range(calls)])
        else:
            out = lax.map(lambda given: exchange_of(n)(*given), tuple(inputs))
        return jnp.moveaxis(out, 0, 1)

    received = np.asarray(sharded(run)(rows, src2dst, counts))
    for call in range(calls):
        check(received[:, call], rows[:, call], src2dst[:, call], n)


@needs_gpus
@pytest.mark.parametrize("unrolled", [False, True])
def test_a_chain_with_stragglers(unrolled):
    """Each call sends on what the last one received, so that buffers are used again at once, and
    another rank is late each time."""
    calls, n, width = 200, 64, 512

    def run(rows):
        me, capacity = lax.axis_index("x"), n
        peer = lax.rem(me + 1, RANKS)
        src2dst = (peer * capacity + jnp.arange(n, dtype=jnp.int32))[:, None]
        counts = jnp.where(jnp.arange(RANKS) == peer, n, 0).astype(jnp.int32)
        before = lax.rem(me + RANKS - 1, RANKS)

        def step(rows, call):
            late = jnp.where(me == lax.rem(call, RANKS), 20, 0)
            rows = lax.fori_loop(0, late, lambda i, x: -jnp.sort(-x, axis=1), rows)
            received = exchange_of(capacity)(rows, src2dst, counts)
            return lax.dynamic_slice_in_dim(received, before * capacity, n) + 1

        if not unrolled:
            return lax.fori_loop(0, calls, lambda call, rows: step(rows, call), rows)
        for call in range(calls):
            rows = step(rows, jnp.int32(call))
        return rows

    # Descending, so that sorting changes nothing; exact in bf16 up to 256.
    start = np.repeat(np.arange(RANKS * n) % 50, width).reshape(-1, width) % 50
    got = sharded(run)(jnp.asarray(start, jnp.bfloat16))
    want = np.roll(start.reshape(RANKS, n, width), calls % RANKS, axis=0) + calls
    np.testing.assert_array_equal(np.asarray(got, np.float64).reshape(want.shape), want)


# ----- what any machine can see -----


def lowered(n, width, dtype, choices, capacity, ranks=4):
    mesh = AbstractMesh((ranks,), ("x",), axis_types=(AxisType.Auto,))
    shapes = (
        jax.ShapeDtypeStruct((ranks * n, width), DTYPES[dtype]),
        jax.ShapeDtypeStruct((ranks * n, choices), jnp.int32),
        jax.ShapeDtypeStruct((ranks * ranks,), jnp.int32),
    )
    fn = sharded(exchange_of(capacity, ranks), mesh)
    return fn.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@every_dtype
@pytest.mark.parametrize("n, width, choices", [(1, 128, 1), (128, 7552, 4), (8192, 32768, 8)])
def test_one_launch_with_peers_and_without_the_host(dtype, n, width, choices):
    text = lowered(n, width, dtype, choices, n)
    assert len(re.findall(r"stablehlo\.custom_call @mosaic_gpu", text)) == 1
    assert "uses_xla_collective_metadata = true" in text
    assert not re.search(r"stablehlo\.(send|recv|infeed|outfeed|all_to_all)\b|callback", text)


@pytest.mark.parametrize("n, choices, capacity", [(0, 4, 8), (8, 0, 8), (8, 4, 0)])
def test_nothing_to_send_is_no_kernel(n, choices, capacity):
    assert "custom_call @mosaic_gpu" not in lowered(n, 256, "bf16", choices, capacity)


@pytest.mark.parametrize(
    "change, error",
    [
        (dict(rows=jnp.zeros((8, 256), jnp.float32)), r"float32; they must be bf16 or float8"),
        (dict(rows=jnp.zeros((8, 200), jnp.bfloat16)), r"\[8, 200\]"),
        (dict(rows=jnp.zeros((8, 32896), jnp.bfloat16)), r"up to 32768"),
        (dict(src2dst=jnp.zeros((7, 1), jnp.int32)), r"int32\[7, 1\].*\[8, J\]"),
        (dict(src2dst=jnp.zeros((8, 1), jnp.int16)), r"int16"),
        (dict(counts=jnp.zeros(3, jnp.int32)), r"\[3\].*ranks=4"),
        (dict(ranks=3, counts=jnp.zeros(3, jnp.int32)), r"ranks=3.*size of axis 'x', 4"),
        (dict(capacity=-1), r"capacity=-1"),
        (dict(capacity=2**30), r"capacity=1073741824"),
    ],
)
def test_what_does_not_fit_is_refused(change, error):
    given = dict(
        rows=jnp.zeros((8, 256), jnp.bfloat16),
        src2dst=jnp.zeros((8, 1), jnp.int32),
        counts=jnp.zeros(4, jnp.int32),
        ranks=4,
        capacity=8,
    )
    given |= change
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def body(_):
        arrays = [given[name] for name in ("rows", "src2dst", "counts")]
        sizes = {name: given[name] for name in ("ranks", "capacity")}
        return one_sided.exchange(*arrays, axis_name="x", **sizes)

    with pytest.raises((TypeError, ValueError), match=error):
        sharded(body, mesh).trace(jax.ShapeDtypeStruct((4,), jnp.int32))


def test_interpret_mode_is_refused():
    rows, src2dst = jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
    sizes = dict(axis_name="x", ranks=2, capacity=1)
    with pytest.raises(NotImplementedError, match="semaphores"):
        one_sided.exchange(rows, src2dst, jnp.zeros(2, jnp.int32), **sizes, interpret=True)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what a CPU lacks")
def test_unavailable_says_why(monkeypatch):
    assert "needs GPUs; these are ['cpu']" in one_sided.unavailable(jax.devices())
    assert "needs GPUs" in one_sided.unavailable(Mesh(np.array(jax.devices()), ("x",)))
    monkeypatch.setattr(jax, "__version__", "99.0.0")
    assert "jax 99.0.0 was not tried" in one_sided.unavailable(jax.devices())
