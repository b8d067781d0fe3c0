"""Scales in the layouts that DeepGEMM's kernels read, in jnp: inside ``jax.jit`` and at load time.

Orientation: DeepGEMM speaks of scales [.., MN, K/g] that are MN-major, that is, of a view with
strides (.., 1, MN4), where MN4 is MN rounded up to TMA's 16 bytes. XLA's arrays are row-major, so
the same bytes are an array [.., K/g, MN4] here, and the bridge hands DeepGEMM the transposed view.
What the columns past MN hold is zero here and unwritten memory from DeepGEMM's own kernels.

SM90 reads f32 scales; SM100 reads UE8M0 (exponents, so powers of two), four along K in an int32.
The value must have been divided by the scale that is packed: round first (``quantize(..., ue8m0=
True)`` does), then quantise. Nothing here rounds a scale unless ``round_up=True`` says so.
"""

import jax
import jax.numpy as jnp
from jax import lax

_TMA_ALIGNED = 4  # elements of 4 bytes in 16
_INFINITY = 0x7F800000  # the bits of f32's exponent
_NAN = 255  # of UE8M0


def mn_major_tma_aligned(scales):
    """f32 scales to what SM90 reads; DeepGEMM's ``get_mn_major_tma_aligned_tensor``.

    Args:
      scales: [.., MN, G] float32.

    Returns:
      [.., G, MN4] float32.

    Raises:
      TypeError, ValueError: another dtype, or fewer than two dimensions.
    """
    scales = _f32(scales)
    return jnp.swapaxes(_padded(scales, scales.shape[-1]), -1, -2)


def pack_ue8m0(scales, *, round_up=False):
    """f32 scales to what SM100 reads; ``get_mn_major_tma_aligned_packed_ue8m0_tensor``.

    Group 4 * j + i along K becomes byte i (the lowest first) of int32 j. As in DeepGEMM's kernel,
    a scale's byte is its f32 exponent, and bytes past G are 0, which reads as 2^-127.

    Args:
      scales: [.., MN, G] float32, powers of two. 0 becomes exponent 0, as in the kernel.
      round_up: round every scale up to a power of two, exponent in 1..254 (DeepGEMM's
        ``ceil_to_ue8m0``); infinite, NaN and negative ones become UE8M0's NaN. Right only if the
        values were not yet divided by ``scales``.

    Returns:
      [.., ceil(G / 4), MN4] int32.

    Raises:
      TypeError, ValueError: another dtype, or fewer than two dimensions.
      ValueError: a scale that has a mantissa or a sign, without ``round_up``. DeepGEMM drops the
        mantissa or stops the kernel, by version and shape. Where values are not known, while
        tracing, such a scale becomes NaN.
    """
    scales = _f32(scales)
    bits = lax.bitcast_convert_type(scales, jnp.int32)
    exponents = bits >> 23
    if round_up:
        broken = (bits < 0) | (bits >= _INFINITY)
        exponents = jnp.clip(exponents + ((bits & 0x7FFFFF) != 0), 1, 254)
    else:
        broken = (bits & ~_INFINITY) != 0
        if not isinstance(broken, jax.core.Tracer) and broken.any():
            raise ValueError(
                f"scales: {int(broken.sum())} are not powers of two, {scales[broken][0]} the first;"
                " quantise with ue8m0=True, or pass round_up=True if no value was divided by them"
            )
    exponents = jnp.where(broken, _NAN, exponents).astype(jnp.uint8)
    words = -(-scales.shape[-1] // 4)
    exponents = _padded(exponents, 4 * words)
    exponents = exponents.reshape(*exponents.shape[:-1], words, 4)
    return lax.bitcast_convert_type(jnp.swapaxes(exponents, -2, -3), jnp.int32)


def unpack_ue8m0(packed, mn, groups):
    """The scales that ``pack_ue8m0`` packed.

    Args:
      packed: [.., ceil(G / 4), MN4] int32.
      mn, groups: MN and G, which the padding hides.

    Returns:
      [.., MN, G] float32. Exponent 0, which the kernels read as 2^-127, becomes 0 and 255 NaN.

    Raises:
      TypeError, ValueError: another dtype, or a shape that is not that of MN and G.
    """
    wanted = _packed_shape(mn, groups)
    if packed.dtype != jnp.int32:
        raise TypeError(f"packed has dtype {packed.dtype}; it must be int32")
    if packed.shape[-2:] != wanted:
        raise ValueError(f"packed has shape {packed.shape}; it must end in {wanted}")
    exponents = jnp.swapaxes(lax.bitcast_convert_type(packed, jnp.uint8), -2, -3)
    exponents = exponents.reshape(*exponents.shape[:-2], -1)[..., :mn, :groups].astype(jnp.int32)
    scales = lax.bitcast_convert_type(exponents << 23, jnp.float32)
    return jnp.where(exponents == _NAN, jnp.nan, scales)


def transform_sf_into_required_layout(
    sf, mn, k, recipe, num_groups=None, is_sfa=None, *, arch, round_up=False
):
    """Scales as a quantiser makes them to the layout that a GEMM on ``arch`` reads.

    DeepGEMM's function of that name (``csrc/apis/layout.hpp``), with its recipes:

    =========  ======================================  ==========================================
    recipe     "sm90"                                  "sm100"
    =========  ======================================  ==========================================
    (1, 128)   [.., ceil(k/128), mn4] float32          [.., ceil(k/512), mn4] int32
    (128, 128) ``sf`` itself                           the same: each block's scale for 128 rows
    (1, 32)    none                                    [.., ceil(k/128), mn4] int32
    =========  ======================================  ==========================================

    Args:
      sf: [num_groups,] [ceil(mn / recipe rows), ceil(k / recipe columns)] float32; on "sm100" also
        int32 in the final layout, which is checked and returned.
      mn, k: rows and depth of the matrix that is scaled (k counts FP4 values, not bytes).
      recipe: (rows, columns) that share a scale, or (rows of a, rows of b, columns) with is_sfa.
      num_groups: E, where ``sf`` has a dimension of experts.
      is_sfa: with a recipe of three: whether these are the scales of a.
      arch: "sm90" or "sm100".
      round_up: as in ``pack_ue8m0``.

    Raises:
      TypeError, ValueError: a dtype, shape, recipe or arch that DeepGEMM has not; on "sm100" a
        scale that is not a power of two, as in ``pack_ue8m0``.
      NotImplementedError: (1, 32) on "sm90".
    """
    if arch not in ("sm90", "sm100"):
        raise ValueError(f"arch is {arch!r}; it must be 'sm90' or 'sm100'")
    if (len(recipe) == 3) != (is_sfa is not None):
        raise ValueError(f"is_sfa is {is_sfa} with recipe {recipe}; three numbers need it, two not")
    gran_mn, gran_k = (recipe[0 if is_sfa else 1], recipe[2]) if len(recipe) == 3 else recipe
    if (gran_mn, gran_k) not in ((1, 128), (128, 128), (1, 32)):
        raise ValueError(
            f"recipe {recipe} shares a scale among {gran_mn} x {gran_k} values; it must be "
            "1 x 128, 128 x 128 or 1 x 32"
        )
    if arch == "sm90" and gran_k == 32:
        raise NotImplementedError("scales of 1 x 32 need 'sm100'; 'sm90' has 1 x 128 and 128 x 128")
    groups = -(-k // gran_k)
    packed = arch == "sm100" and sf.dtype == jnp.int32 and gran_mn == 1
    shape = _packed_shape(mn, groups) if packed else (-(-mn // gran_mn), groups)
    shape = shape if num_groups is None else (num_groups, *shape)
    if sf.shape != shape:
        raise ValueError(
            f"sf has shape {sf.shape}; it must be {shape} for mn = {mn}, k = {k}, recipe {recipe}"
            f" and num_groups {num_groups}"
        )
    if packed:
        return sf
    sf = _f32(sf, "sf")
    if arch == "sm90":
        return mn_major_tma_aligned(sf) if gran_mn == 1 else sf
    return pack_ue8m0(jnp.repeat(sf, gran_mn, axis=-2)[..., :mn, :], round_up=round_up)


def _f32(scales, name="scales"):
    if scales.dtype != jnp.float32:
        raise TypeError(f"{name} has dtype {scales.dtype}; it must be float32")
    if scales.ndim < 2:
        raise ValueError(f"{name} has shape {scales.shape}; it must be [.., MN, K/g]")
    return jnp.asarray(scales)


def _packed_shape(mn, groups):
    return -(-groups // 4), -(-mn // _TMA_ALIGNED) * _TMA_ALIGNED


def _padded(scales, columns):
    """[.., MN, G] -> [.., MN4, columns], zeros in what is new."""
    *lead, mn, groups = scales.shape
    tail = [(0, 0)] * len(lead) + [(0, -mn % _TMA_ALIGNED), (0, columns - groups)]
    return jnp.pad(scales, tail)
