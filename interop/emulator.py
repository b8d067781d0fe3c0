"""DeepGEMM's grouped GEMMs on a CPU, from the bytes that its SM90 kernels would read.

Shares no code with what packs those bytes. The shim hands over plain integers only.
"""

import ctypes
import math

import ml_dtypes
import numpy as np

_DTYPES = {  # DLPack (code, bits)
    (0, 32): np.dtype(np.int32),
    (2, 32): np.dtype(np.float32),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
}
_SCALE_GROUP = 128
# The FP8 kernel decides for each 64 rows of a block whether they hold anything (WGMMA's M).
_WAVE = 64


def _tensors(flat):
    """Views of the memory that ``address, code, bits, ndim, shape..., strides...`` describe."""
    views, at = [], 0
    while at < len(flat):
        address, code, bits, ndim = flat[at : at + 4]
        shape, strides = flat[at + 4 : at + 4 + ndim], flat[at + 4 + ndim : at + 4 + 2 * ndim]
        at += 4 + 2 * ndim
        if (code, bits) not in _DTYPES:
            raise TypeError(f"DLPack dtype code {code} with {bits} bits is not one DeepGEMM reads")
        dtype = _DTYPES[code, bits]
        if 0 in shape:
            views.append(np.empty(shape, dtype))
            continue
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
        byte_strides = [s * dtype.itemsize for s in strides]
        views.append(np.ndarray(shape, dtype, memory, strides=byte_strides))
    return views


def _require_tma_scales(a_scales, a):
    # The TMA descriptor is made from the shape alone; other strides would be repacked on the GPU.
    *slabs, rows, depth = a.shape
    groups, aligned_rows = depth // _SCALE_GROUP, math.ceil(rows / 4) * 4
    wanted = (*(groups * aligned_rows for _ in slabs), 1, aligned_rows)
    strides = tuple(s // a_scales.itemsize for s in a_scales.strides)
    if a_scales.shape != (*slabs, rows, groups) or strides != wanted:
        raise ValueError(
            f"scales of a: shape {a_scales.shape} with strides {strides}; the kernel reads shape "
            f"{(*slabs, rows, groups)} with strides {wanted}"
        )


def _operands(integers):
    """a, a_scales, b, b_scales, d, the groups and the last integer; no scales: bf16."""
    *flat, number = (int(i) for i in integers)
    tensors = _tensors(flat)
    if len(tensors) == 4:
        a, b, d, groups = tensors
        return a, None, b, None, d, groups, number
    _require_tma_scales(tensors[1], tensors[0])
    return *tensors, number


def _product(a, a_scales, b, b_scales):
    """a [M, K] times b [N, K] transposed, as bf16: by way of f32, as the kernels round theirs."""
    with np.errstate(all="ignore"):  # padding rows may hold anything
        x, w = a.astype(np.float64), b.astype(np.float64)
        if a_scales is not None:
            x *= np.repeat(a_scales.astype(np.float64), _SCALE_GROUP, axis=1)
            blocks = b_scales.astype(np.float64)
            blocks = blocks.repeat(_SCALE_GROUP, axis=0).repeat(_SCALE_GROUP, axis=1)
            w *= blocks[: w.shape[0], : w.shape[1]]
        return (x @ w.T).astype(np.float32).astype(ml_dtypes.bfloat16)


def m_grouped_gemm_nt_contiguous(*integers):
    """``d[r] = a[r] @ b[m_indices[first row of r's block]].T``, written in place as bf16.

    Args:
      *integers: the tensors ``a, b, d, m_indices`` (bf16) or ``a, a_scales, b, b_scales, d,
        m_indices`` (e4m3 with f32 scales: 1x128 along K for a, 128x128 for b), each as address,
        DLPack dtype code, bits, ndim, shape, strides (in elements); then the alignment, which is
        the number of rows in a block.

    A block whose first m_indices is -1 is left untouched, and in FP8 so are 64 rows of a block
    that start with -1. (On an H200 such rows get zeros in FP8, and in bf16 whatever expert 0 makes
    of the padding; nobody may read them.)

    Raises:
      ValueError, TypeError: memory that DeepGEMM would refuse or read wrongly.
      IndexError: an expert that does not exist; a GPU would read past the weights.
    """
    a, a_scales, b, b_scales, d, m_indices, alignment = _operands(integers)
    fp8 = a_scales is not None
    rows, experts = a.shape[0], b.shape[0]
    if m_indices.shape != (rows,) or d.shape != (rows, b.shape[1]):
        raise ValueError(
            f"m_indices {m_indices.shape} and d {d.shape} do not fit a {a.shape}, b {b.shape}"
        )

    rows_of = {}
    for first in range(0, rows, alignment):
        expert = int(m_indices[first])
        if expert >= experts:
            raise IndexError(f"m_indices[{first}] = {expert}, but b holds {experts} experts")
        if expert < 0:
            continue
        end = min(first + alignment, rows)
        step = _WAVE if fp8 else alignment
        for wave in range(first, end, step):
            if m_indices[wave] >= 0 or not fp8:
                rows_of.setdefault(expert, []).extend(range(wave, min(wave + step, end)))

    for e, live in rows_of.items():
        scales = (a_scales[live], b_scales[e]) if fp8 else (None, None)
        d[live] = _product(a[live], scales[0], b[e], scales[1])


def m_grouped_gemm_nt_masked(*integers):
    """``d[e] = a[e] @ b[e].T`` on the first ``masked_m[e]`` rows, written in place as bf16.

    Args:
      *integers: the tensors ``a, b, d, masked_m`` (bf16) or ``a, a_scales, b, b_scales, d,
        masked_m``, as of the contiguous function, a and d with a leading dimension of experts;
        then expected_m, which chooses among equal kernels and is not read here.

    The kernels store whole waves of 64 rows: the rest of the last one holds NaN here.

    Raises:
      ValueError, TypeError: memory that DeepGEMM would refuse or read wrongly, or a masked_m
        beyond the slab, which a GPU would read past.
    """
    a, a_scales, b, b_scales, d, masked_m, _ = _operands(integers)
    experts, capacity, _ = a.shape
    if masked_m.shape != (experts,) or d.shape != (experts, capacity, b.shape[1]):
        raise ValueError(
            f"masked_m {masked_m.shape} and d {d.shape} do not fit a {a.shape}, b {b.shape}"
        )
    for e, rows in enumerate(masked_m):
        if not 0 <= rows <= capacity:
            raise ValueError(f"masked_m[{e}] = {rows}, but a slab holds {capacity} rows")
        scales = (None, None) if a_scales is None else (a_scales[e, :rows], b_scales[e])
        d[e, rows : math.ceil(rows / _WAVE) * _WAVE] = np.nan
        d[e, :rows] = _product(a[e, :rows], scales[0], b[e], scales[1])
