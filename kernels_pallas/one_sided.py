"""Rows to the other GPUs of a mesh axis: every rank writes straight into its peers' buffers.

One launch moves each row once from memory to shared memory and from there by the bulk copy engine
to every rank that wants it, over NVLink. The way in and the way back of expert parallelism are the
same call. Nothing passes through staging buffers, and no rank waits for more than it is sent.

What orders the writes, without the host:

1. Before the kernel, XLA lines the ranks' streams up (its multi-GPU barrier, in front of every
   Mosaic kernel with remote references), so that nobody signals into semaphores that their owner
   has yet to clear, nor writes into a buffer that an earlier step of its owner still reads.
2. `entered`: a rank counts the ranks that are in this call, so also that their `received` exists;
   only then does it write. It is signalled first and waited for behind the first loads.
3. `arrived[r]`: a rank counts the blocks of rank r that have written all of theirs. A block waits
   until its copies are complete (not just read), then adds one with system-wide release; a waiter
   acquires. At the number of blocks (`blocks_for`) rows r * capacity .. (r + 1) * capacity - 1 are
   there, whatever the other ranks do: what follows in the same kernel could begin on them.
4. A rank leaves when all have arrived: nothing then is on its way to its buffers or semaphores.

Ranks wait for each other inside the kernel, so two exchanges of a program must come in the same
order on all of them: let one depend on the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import BF16, FP8, I32, TRIED, Registers, launch, own_index, vector

UNIT = 128  # elements: the bulk copy takes at most 256 along a dimension, a row is [W / 128, 128]
MOST_UNITS = 256
BLOCKS = 132  # SMs of an H100 or H200 SXM: all blocks run at once
RING_BYTES, MOST_SLOTS = 160 * 1024, 8  # shared memory of a block: rows in flight
MOST_DEVICES = 8  # of one process, jax 0.10.2 and 0.11.2
LEAST_NCCL = (2, 29, 2)  # that tells a process where the memory of another one's GPU is


def exchange(
    rows: Array,
    src2dst: Array,
    counts: Array,
    *,
    axis_name: str,
    ranks: int,
    capacity: int,
    interpret: bool = False,
) -> Array:
    """rows [N, W], src2dst [N, J] int32, counts [ranks] int32 -> received [ranks * capacity, W].

    Inside jax.shard_map over a mesh with the axis `axis_name` of `ranks` devices; all of them call
    it with the same shapes. For each d = src2dst[n, j] >= 0, row n goes to rank p = d // capacity,
    into row r * capacity + d % capacity of its `received`, r being the sender; -1 goes nowhere.

    rows are bf16 or float8_e4m3fn, W % 128 == 0. counts[p] says how many rows go to rank p: each of
    the positions 0 .. counts[p] - 1 must be in src2dst once. Of the other rows of `received`, the
    last 128 elements are all-ones bits (-1, read as integers), the rest is unspecified.

    Raises TypeError or ValueError for a dtype, shape or size that does not fit, NotImplementedError
    in interpret mode, which knows neither semaphores nor other devices' memory (jax 0.10.2 and
    0.11.2). Where it runs: `unavailable`.
    """
    if interpret:
        raise NotImplementedError(
            "Mosaic GPU interpret mode knows no semaphores and no memory of other devices: "
            "exchange rows by lax.all_to_all there"
        )
    if rows.dtype not in (BF16, FP8):
        raise TypeError(f"rows are {rows.dtype}; they must be bf16 or float8_e4m3fn")
    if rows.ndim != 2 or rows.shape[1] % UNIT or not 0 < rows.shape[1] <= MOST_UNITS * UNIT:
        raise ValueError(
            f"rows are {list(rows.shape)}; they must be [N, W], W a multiple of {UNIT} up to "
            f"{MOST_UNITS * UNIT}"
        )
    n, width = rows.shape
    if src2dst.ndim != 2 or src2dst.shape[0] != n or src2dst.dtype != I32:
        raise ValueError(
            f"src2dst is {src2dst.dtype}{list(src2dst.shape)}; it must be int32 [{n}, J]"
        )
    if counts.shape != (ranks,) or counts.dtype != I32:
        raise ValueError(
            f"counts is {counts.dtype}{list(counts.shape)}; it must be int32 [ranks={ranks}]"
        )
    if ranks < 2 or lax.axis_size(axis_name) != ranks:
        raise ValueError(
            f"ranks={ranks}; it must be the size of axis {axis_name!r}, "
            f"{lax.axis_size(axis_name)}, and at least 2"
        )
    if not 0 <= capacity <= jnp.iinfo(I32).max // ranks:
        raise ValueError(f"capacity={capacity}; ranks={ranks} times that must be an int32 >= 0")
    units, choices = width // UNIT, src2dst.shape[1]
    received = jax.ShapeDtypeStruct((ranks * capacity, units, UNIT), rows.dtype)
    if n == 0 or choices == 0 or capacity == 0:  # On all ranks alike: nothing is sent.
        return _ones(received.shape, rows.dtype).reshape(ranks * capacity, width)
    blocks = blocks_for(n)
    slots = max(2, min(MOST_SLOTS, RING_BYTES // (width * rows.dtype.itemsize)))
    behind = slots // 2  # copies out that are in flight before their slots are filled again
    regs = Registers(interpret)

    def one_sided(rows_ref, src2dst_ref, counts_ref, received_ref, ring, full):
        block, me = own_index("b"), lax.axis_index(axis_name)
        entered = pl.get_global(plgpu.SemaphoreType.REGULAR)
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((ranks,)))

        @pl.when(block == 0)
        def _():
            for rank in range(ranks):
                pl.semaphore_signal(entered, device_id={axis_name: rank})

        mine = lax.div(n - block + blocks - 1, blocks)

        def load(turn, slot):
            row = block + turn * blocks
            plgpu.copy_gmem_to_smem(rows_ref.at[row], ring.at[slot], full.at[slot])

        for slot in range(slots):
            pl.when(slot < mine)(lambda slot=slot: load(slot, slot))
        pl.semaphore_wait(entered, ranks, decrement=False)

        def send(turn, _):
            slot, row = lax.rem(turn, slots), block + turn * blocks
            plgpu.barrier_wait(full.at[slot])

            def to_one(j, _):
                dst = src2dst_ref[row, j]
                for rank in range(ranks):  # The copy engine's descriptors are made on the host.
                    at = dst - rank * capacity

                    @pl.when((at >= 0) & (at < capacity))
                    def _(rank=rank, at=at):
                        theirs = plgpu.remote_ref(received_ref, {axis_name: rank})
                        plgpu.copy_smem_to_gmem(
                            ring.at[slot], theirs.at[me * capacity + at], commit_group=False
                        )

            lax.fori_loop(0, choices, to_one, None)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(behind, wait_read_only=True)
            refill = turn - behind

            @pl.when((refill >= 0) & (refill + slots < mine))
            def _():
                load(refill + slots, lax.rem(refill, slots))

        lax.fori_loop(0, mine, send, None)

        ones = regs.cast(_ones((UNIT,), rows.dtype), vector(UNIT))

        def mark(rank, _):
            theirs = plgpu.remote_ref(received_ref, {axis_name: rank})
            first = counts_ref[rank] + block

            def mark_row(i, _):
                theirs[me * capacity + first + i * blocks, units - 1] = ones

            lax.fori_loop(0, lax.div(capacity - first + blocks - 1, blocks), mark_row, None)

        lax.fori_loop(0, ranks, mark, None)
        # A barrier, too: the thread that signals releases what the others have written.
        plgpu.wait_smem_to_gmem(0)
        for rank in range(ranks):
            pl.semaphore_signal(arrived.at[me], device_id={axis_name: rank})

        @pl.when(block == 0)
        def _():
            for rank in range(ranks):
                pl.semaphore_wait(arrived.at[rank], blocks, decrement=False)

    return launch(
        one_sided,
        received,
        grid={"b": blocks},
        scratch=(
            plgpu.SMEM((slots, units, UNIT), rows.dtype),
            plgpu.Barrier(num_barriers=slots),
        ),
        interpret=interpret,
        barriers=False,
    )(rows.reshape(n, units, UNIT), src2dst, counts).reshape(ranks * capacity, width)


def unavailable(where: jax.sharding.Mesh | Sequence[jax.Device]) -> str | None:
    """Why `exchange` cannot run over a mesh, or over devices in a mesh's row-major order; None
    where it can. GPUs of one machine in one process can; with a process for each, and NCCL 2.32.3,
    it ran on two, and with NCCL 2.28.9 it did not. No use is made of NVLink multicast.
    """
    devices = list(where.devices.flat) if isinstance(where, jax.sharding.Mesh) else list(where)
    if jax.__version__ not in TRIED:
        # What it needs of XLA, the barrier before the kernel, is promised by no document.
        return f"jax {jax.__version__} was not tried; {' and '.join(TRIED)} were"
    if any(d.platform != "gpu" for d in devices):
        return f"it needs GPUs; these are {sorted({d.platform for d in devices})}"
    if len(devices) < 2:
        return "it needs two GPUs or more; there is one"
    if any(tuple(map(int, d.compute_capability.split("."))) < (9, 0) for d in devices):
        return f"it needs Hopper or newer; these are {sorted({d.device_kind for d in devices})}"
    if len({d.process_index for d in devices}) > 1:
        found = _nccl_version()
        if found is None or found < LEAST_NCCL:
            text = "none" if found is None else ".".join(map(str, found))
            return (
                f"GPUs of several processes need NCCL {'.'.join(map(str, LEAST_NCCL))} or later"
                f" (nvidia-nccl-cu13), and {text} is loaded; GPUs of one process do not"
            )
        return None  # what they can reach, NCCL says when it maps it
    if [d.id for d in devices] != list(range(len(devices))):
        return f"Mosaic GPU needs devices 0, 1, .. in order; these are {[d.id for d in devices]}"
    if len(devices) > MOST_DEVICES:
        return f"Mosaic GPU reaches {MOST_DEVICES} GPUs of a process; these are {len(devices)}"
    return _no_peer_access([d.local_hardware_id for d in devices])


def _nccl_version() -> tuple[int, int, int] | None:
    try:  # the library that JAX has loaded goes by this name
        library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int(0)
    except OSError:
        return None
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _no_peer_access(ordinals: list[int]) -> str | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        return f"the CUDA driver says whether GPUs reach each other's memory, and it is absent: {e}"
    for here in ordinals:
        for there in ordinals:
            can = ctypes.c_int(0)
            error = cuda.cuDeviceCanAccessPeer(ctypes.byref(can), here, there)
            if here != there and (error or not can.value):
                return f"GPU {here} cannot write into the memory of GPU {there}"
    return None


def blocks_for(num_rows: int) -> int:
    """Blocks of a launch, which is what `arrived` counts to."""
    return min(BLOCKS, num_rows)


def _ones(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    bits = jnp.int8 if dtype == FP8 else jnp.int16
    return lax.bitcast_convert_type(jnp.full(shape, -1, bits), dtype)
