"""DeepGEMM's grouped GEMMs on a CPU, from the bytes that its SM90 and SM100 kernels would read.

Shares no code with what packs those bytes. The shim hands over plain integers only.

Which format the bytes have follows from dtypes and shapes. Scales in f32 are SM90's: one per 128
values of a row of a, and per 128 x 128 block of b. Scales in int32 are SM100's, for both operands:
one UE8M0 byte (2^(byte - 127), 255 is NaN) per row and 128 or 32 values, four along K in an int32,
the first in the lowest byte. Values in int8 or uint8 are FP4 (E2M1), two along K in a byte, the
first in the low nibble. Scales that a TMA descriptor reads must be MN-major: neighbouring rows side
by side, and MN rounded up to 4 (16 bytes) from one column to the next.
"""

import ctypes
import math

import ml_dtypes
import numpy as np

_DTYPES = {  # DLPack (code, bits)
    (0, 8): np.dtype(np.int8),
    (0, 32): np.dtype(np.int32),
    (1, 8): np.dtype(np.uint8),
    (2, 32): np.dtype(np.float32),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
}
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SCALE_GROUP = 128
# SM90's FP8 kernel decides for each 64 rows of a block whether they hold anything (WGMMA's M).
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


def _is_fp4(values):
    return values.dtype in (np.int8, np.uint8)


def _depth(values):
    """K: a byte of FP4 holds two of its values."""
    return values.shape[-1] * (2 if _is_fp4(values) else 1)


def _granularity(scales, values):
    """Values along K that share a scale, as the width of the scales says.

    One int32 a row, at K <= 128, fits 1x128 and 1x32: then 1x32 for FP4, which has no other, and
    1x128 for FP8, as in DeepGEMM's default recipe.
    """
    if scales.dtype != np.int32:
        return _SCALE_GROUP
    choices = (32,) if _is_fp4(values) else (128, 32)
    fitting = [g for g in choices if scales.shape[-1] == math.ceil(_depth(values) / (4 * g))]
    return (fitting or choices)[0]


def _require_tma_scales(scales, values, name="a", granularity=None):
    # The TMA descriptor is made from the shape alone; other strides would be repacked on the GPU.
    *slabs, rows, _ = values.shape
    granularity = granularity or _granularity(scales, values)
    groups = math.ceil(_depth(values) / (granularity * (4 if scales.dtype == np.int32 else 1)))
    aligned_rows = math.ceil(rows / 4) * 4
    wanted = (*(groups * aligned_rows for _ in slabs), 1, aligned_rows)
    strides = tuple(s // scales.itemsize for s in scales.strides)
    if scales.shape != (*slabs, rows, groups) or strides != wanted:
        raise ValueError(
            f"scales of {name}: shape {scales.shape} with strides {strides}; the kernel reads "
            f"shape {(*slabs, rows, groups)} with strides {wanted}"
        )


def _operands(integers):
    """a, a_scales, b, b_scales, d, the groups, the number after them and the K granularities.

    No scales: bf16.
    """
    flat, end = [int(i) for i in integers], 0
    while len(flat) - end >= 6:  # a vector's four integers, its size and its stride
        end += 4 + 2 * flat[end + 3]
    tensors, (number, *granularities) = _tensors(flat[:end]), flat[end:]
    if len(tensors) == 4:
        a, b, d, groups = tensors
        return a, None, b, None, d, groups, number, (None, None)
    a, a_scales, b, b_scales, d, groups = tensors
    fp4 = [values for values in (a, b) if _is_fp4(values)]
    if a_scales.dtype != b_scales.dtype or (fp4 and b_scales.dtype != np.int32):
        raise TypeError(
            f"a is {a.dtype} with {a_scales.dtype} scales, b {b.dtype} with {b_scales.dtype}; both "
            "scales must be f32 (SM90, FP8 only) or int32 (SM100)"
        )
    if fp4 and _depth(fp4[0]) % 128:
        raise ValueError(f"K is {_depth(fp4[0])}; FP4 needs a multiple of 128")
    granularities = granularities or [_granularity(a_scales, a), _granularity(b_scales, b)]
    _require_tma_scales(a_scales, a, "a", granularities[0])
    if b_scales.dtype == np.int32:
        _require_tma_scales(b_scales, b, "b", granularities[1])
    return *tensors, number, tuple(granularities)


def _numbers(values, scales, granularity=None):
    """[rows, K] float64: an operand as the kernel multiplies it."""
    if _is_fp4(values):
        codes = np.stack([values & 0xF, (values >> 4) & 0xF], axis=-1).reshape(len(values), -1)
        numbers = np.where(codes & 8, -1.0, 1.0) * _E2M1[codes & 7]
    else:
        numbers = values.astype(np.float64)
    if scales is None:
        return numbers
    rows, depth = numbers.shape
    granularity = granularity or _granularity(scales, values)
    if scales.dtype == np.int32:
        codes = np.stack([(scales >> shift) & 0xFF for shift in (0, 8, 16, 24)], axis=-1)
        codes = codes.reshape(rows, 4 * scales.shape[1])
        scales = np.where(codes == 255, np.nan, np.exp2(codes - 127.0))
    elif len(scales) != rows:
        scales = scales.repeat(_SCALE_GROUP, axis=0)[:rows]
    return numbers * scales.astype(np.float64).repeat(granularity, axis=1)[:, :depth]


def _product(a, a_scales, b, b_scales, granularities=(None, None)):
    """a [M, K] times b [N, K] transposed, as bf16: by way of f32, as the kernels round theirs."""
    with np.errstate(all="ignore"):  # padding rows may hold anything
        x, w = _numbers(a, a_scales, granularities[0]), _numbers(b, b_scales, granularities[1])
        return (x @ w.T).astype(np.float32).astype(ml_dtypes.bfloat16)


def m_grouped_gemm_nt_contiguous(*integers):
    """``d[r] = a[r] @ b[m_indices[first row of r's block]].T``, written in place as bf16.

    Args:
      *integers: the tensors ``a, b, d, m_indices`` (bf16) or ``a, a_scales, b, b_scales, d,
        m_indices`` (the module says in which formats), each as address, DLPack dtype code, bits,
        ndim, shape, strides (in elements); then the alignment, which is the number of rows in a
        block; then, if the recipes are given, how many values along K share a scale in a and in b.

    A block whose first m_indices is -1 is left untouched, and in SM90's FP8 so are 64 rows of a
    block that start with -1. (On an H200 such rows get zeros in FP8, and in bf16 whatever expert 0
    makes of the padding, as from SM100's scheduler; nobody may read them.)

    Raises:
      ValueError, TypeError: memory that DeepGEMM would refuse or read wrongly.
      IndexError: an expert that does not exist; a GPU would read past the weights.
    """
    a, a_scales, b, b_scales, d, m_indices, alignment, recipes = _operands(integers)
    fp8 = a_scales is not None
    in_waves = fp8 and a_scales.dtype == np.float32
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
        step = _WAVE if in_waves else alignment
        for wave in range(first, end, step):
            if m_indices[wave] >= 0 or not in_waves:
                rows_of.setdefault(expert, []).extend(range(wave, min(wave + step, end)))

    for e, live in rows_of.items():
        scales = (a_scales[live], b_scales[e]) if fp8 else (None, None)
        d[live] = _product(a[live], scales[0], b[e], scales[1], recipes)


def m_grouped_gemm_nt_masked(*integers):
    """``d[e] = a[e] @ b[e].T`` on the first ``masked_m[e]`` rows, written in place as bf16.

    Args:
      *integers: the tensors ``a, b, d, masked_m`` (bf16) or ``a, a_scales, b, b_scales, d,
        masked_m``, as of the contiguous function, a and d with a leading dimension of experts;
        then expected_m, which chooses among equal kernels and is not read here; then the recipes
        as there.

    The kernels store whole waves of 64 rows: the rest of the last one holds NaN here.

    Raises:
      ValueError, TypeError: memory that DeepGEMM would refuse or read wrongly, or a masked_m
        beyond the slab, which a GPU would read past.
    """
    a, a_scales, b, b_scales, d, masked_m, _, recipes = _operands(integers)
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
        d[e, :rows] = _product(a[e, :rows], scales[0], b[e], scales[1], recipes)


def _leading_tensors(integers, count):
    """The first ``count`` tensors, and the integers after them."""
    flat, end = [int(i) for i in integers], 0
    for _ in range(count):
        end += 4 + 2 * flat[end + 3]
    return _tensors(flat[:end]), flat[end:]


def gemm_nt(*integers):
    """``d = a @ b.T``, written in place in d's dtype.

    Args:
      *integers: the tensors ``a, b, d`` (bf16; d f32) or ``a, a_scales, b, b_scales, d`` (in the
        formats that the module says; d bf16), as of m_grouped_gemm_nt_contiguous; then, for the
        latter, how many values along K share a scale in a and in b.

    Raises:
      ValueError: memory that DeepGEMM would refuse or read wrongly.
    """
    # a or its scales; the latter come with two integers after the tensors.
    tensors, granularities = _leading_tensors(integers, 3)
    if len(granularities) > 2:
        tensors, granularities = _leading_tensors(integers, 5)
        a, a_scales, b, b_scales, d = tensors
        _require_tma_scales(a_scales, a, "a", granularities[0])
        if b_scales.dtype == np.int32:
            _require_tma_scales(b_scales, b, "b", granularities[1])
    else:
        (a, b, d), a_scales, b_scales, granularities = tensors, None, None, (None, None)
    if d.shape != (len(a), len(b)):
        raise ValueError(f"d {d.shape} does not fit a {a.shape}, b {b.shape}")
    x, w = _numbers(a, a_scales, granularities[0]), _numbers(b, b_scales, granularities[1])
    with np.errstate(all="ignore"):
        d[:] = (x @ w.T).astype(np.float32).astype(d.dtype)


def tf32_hc_prenorm_gemm(*integers):
    """``d[s] = a @ b.T`` and ``sqr_sum[s] = sum(a * a)`` over the s-th part of K, in f32.

    Args:
      *integers: the tensors ``a`` (bf16), ``b`` (f32), ``d``, ``sqr_sum`` (both f32), as of
        m_grouped_gemm_nt_contiguous; then the number of parts.

    Tensor cores read 10 bits of a mantissa of b and not the rest. Blocks of 64 are dealt to the
    parts in order, the first ones getting one more where they do not divide evenly.
    """
    (a, b, d, sqr_sum), (num_splits,) = _leading_tensors(integers, 4)
    shape = (num_splits, len(a), len(b))
    if d.shape != shape or sqr_sum.shape != shape[:2]:
        raise ValueError(f"d {d.shape}, sqr_sum {sqr_sum.shape} do not fit {shape}")
    x = a.astype(np.float64)
    w = (b.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    parts = np.array_split(np.arange(x.shape[1]).reshape(-1, 64), num_splits)
    for s, part in enumerate(part.ravel() for part in parts):
        d[s] = x[:, part] @ w[:, part].T
        sqr_sum[s] = np.square(x[:, part]).sum(axis=1)


def _k_groups(integers):
    """a, a_scales, b, b_scales, d, c and the groups: (index, first and last along K) of each."""
    tensors, ks = _leading_tensors(integers, 5)
    if tensors[1].dtype == tensors[0].dtype:
        (a, b, d, layout, c), a_scales, b_scales = tensors, None, None
    else:
        (a, a_scales, b, b_scales, d, layout, c), (*ks, _, _) = _leading_tensors(integers, 7)
    if list(layout) != list(ks) or d.dtype != np.float32 or c.shape != d.shape:
        raise ValueError(f"group sizes {layout} and {ks}, c {c.shape} and d {d.shape} {d.dtype}")
    ends = np.cumsum(ks)
    groups = [(g, int(end - k), int(end)) for g, (k, end) in enumerate(zip(ks, ends, strict=True))]
    return a, a_scales, b, b_scales, d, c, groups


def k_grouped_gemm_nt_contiguous(*integers):
    """``d[g] = c[g] + a_g @ b_g.T`` in f32; a_g is [M, ks[g]], after the groups before it in a.

    Args:
      *integers: the tensors ``a`` (e4m3), ``a_scales`` (f32), ``b``, ``b_scales``, ``d`` (f32),
        ``ks`` (int32), ``c`` (f32), as of m_grouped_gemm_nt_contiguous; then the numbers in ks,
        and the granularities of a and b, which are 128.
    """
    a, a_scales, b, b_scales, d, c, groups = _k_groups(integers)

    def operand(values, scales, size, first, end):
        wanted = (size, len(values) // size // _SCALE_GROUP)
        strides = tuple(s // scales.itemsize for s in scales.strides)
        if scales.shape != wanted or strides != (1, math.ceil(size / 4) * 4):
            raise ValueError(
                f"scales {scales.shape}, strides {strides}; must be {wanted}, MN-major"
            )
        block = values[first * size : end * size].reshape(size, end - first)
        return _numbers(block, scales[:, first // _SCALE_GROUP : end // _SCALE_GROUP])

    for g, first, end in groups:
        x = operand(a, a_scales, d.shape[1], first, end)
        w = operand(b, b_scales, d.shape[2], first, end)
        d[g] = c[g] + (x @ w.T).astype(np.float32)


def k_grouped_gemm_tn_contiguous(*integers):
    """``d[g] = c[g] + a_g.T @ b_g`` in f32; a_g are rows of a, ks[g] after those of groups before.

    Args:
      *integers: the tensors ``a``, ``b`` (bf16), ``d`` (f32), ``ks`` (int32), ``c`` (f32), or
        ``a`` (e4m3), ``a_scales`` (int32), ``b``, ``b_scales``, ``d``, ``ks``, ``c``, as of
        m_grouped_gemm_nt_contiguous; then the numbers in ks; then the granularities, 32 and 32.
    """
    a, a_scales, b, b_scales, d, c, groups = _k_groups(integers)

    def operand(values, scales, first, end):
        block = np.ascontiguousarray(values[first:end].T)
        if scales is None:
            return block.astype(np.float64)
        if scales.shape != (len(values) // 128, values.shape[1]) or not scales.flags.c_contiguous:
            raise ValueError(f"scales {scales.shape} of values {values.shape}; must be row-major")
        return _numbers(block, scales[first // 128 : end // 128].T, 32)

    for g, first, end in groups:
        x, w = operand(a, a_scales, first, end), operand(b, b_scales, first, end)
        d[g] = c[g] + (x @ w.T).astype(np.float32)
