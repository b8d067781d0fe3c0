"""The "xla" backend: every step in jnp. It runs anywhere, is the default on a CPU, and is the
control that the kernels are compared with. Flat arrays in, flat arrays out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from dgmoe_jax import checks
from dgmoe_jax.interop.scales import unpack_ue8m0
from dgmoe_jax.kernels_pallas import fp4
from dgmoe_jax.layouts import num_tiles
from dgmoe_jax.tracing import vary_alike

F32 = jnp.float32


def _softmax(x: Array) -> Array:
    top = jnp.max(x, axis=-1, keepdims=True)
    e = jnp.exp(x - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1.0)


SCORING = {
    "softmax": _softmax,
    "softmax_topk": lambda x: x,  # the softmax comes after the choice
    "sigmoid": jax.nn.sigmoid,
    # log1p(exp(x)) overflows for large x; softplus is the same function, stable.
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
}
LARGEST = jnp.finfo(F32).max


def route(
    logits: Array,
    bias: Array | None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    token_ids: Array | None = None,
    hash_table: Array | None = None,
    valid: Array | None = None,
    expert_map: Array | None = None,
    fused_shared_experts: int = 0,
    shared_weight: float = 1.0,
) -> tuple[Array, Array]:
    """logits [T, E] f32, bias [E] f32 or None -> topk_ids [T, k + n] int32, topk_weights f32.

    NaN counts as -inf and +inf as the largest finite f32, so that every row has legal distinct
    ids and finite weights. Ties go to the lowest id. `hash_table` [vocab, k] int32 gives the ids by
    `token_ids` [T] int32 instead; what lies outside the table or names no expert is -1.
    n = `fused_shared_experts` slots E, E + 1, ... of `shared_weight` follow. Slots of tokens that
    are not `valid` [T] bool are -1; `expert_map` [C, E + n] int32 then turns ids into those of
    copy (token % C). Slots of -1 weigh 0.
    """
    num_tokens, num_experts = logits.shape
    scores = SCORING[scoring](jnp.minimum(jnp.where(jnp.isnan(logits), -jnp.inf, logits), LARGEST))
    if hash_table is None:
        topk_ids = _choose(scores, bias, top_k, num_groups, top_groups)
    else:
        token = jnp.clip(token_ids, 0, hash_table.shape[0] - 1)
        topk_ids = jnp.where((token == token_ids)[:, None], hash_table[token], -1)
        topk_ids = jnp.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids, -1)
    weights = jnp.take_along_axis(scores, jnp.maximum(topk_ids, 0), axis=1)
    if scoring == "softmax_topk":
        weights = jnp.where(topk_ids >= 0, jnp.maximum(weights, -LARGEST), -LARGEST)
        top = jnp.max(weights, axis=-1, keepdims=True)
        weights = jnp.where(weights > -LARGEST, jnp.exp(weights - top), 0.0)
    weights = jnp.where(topk_ids >= 0, weights, 0.0)
    if renormalize or scoring == "softmax_topk":
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)

    if fused_shared_experts:
        shape = (num_tokens, fused_shared_experts)
        shared = num_experts + lax.broadcasted_iota(jnp.int32, shape, 1)
        topk_ids = jnp.concatenate([topk_ids, shared], axis=1)
        weights = jnp.concatenate([weights, jnp.full(shape, shared_weight, F32)], axis=1)
    known = topk_ids >= 0 if valid is None else (topk_ids >= 0) & valid[:, None]
    if expert_map is not None:
        copy = jnp.arange(num_tokens) % expert_map.shape[0]
        topk_ids = expert_map[copy[:, None], jnp.maximum(topk_ids, 0)]
        known &= topk_ids >= 0
    return jnp.where(known, topk_ids, -1), jnp.where(known, weights, 0.0)


def _choose(
    scores: Array, bias: Array | None, top_k: int, num_groups: int, top_groups: int
) -> Array:
    key = scores if bias is None else scores + bias
    # -inf is kept for experts of losing groups, which must stay below every other key;
    # lax.top_k orders -0.0 below 0.0, so zeros are made alike.
    key = jnp.maximum(jnp.where(jnp.isnan(key), -LARGEST, key), -LARGEST)
    key = jnp.where(key == 0, 0.0, key)
    if num_groups > 1:
        grouped = key.reshape(key.shape[0], num_groups, -1)
        best = lax.top_k(grouped, min(2, grouped.shape[-1]) if bias is not None else 1)[0]
        _, winners = lax.top_k(jnp.sum(best, axis=-1), top_groups)
        survives = jnp.any(winners[:, :, None] == jnp.arange(num_groups), axis=1)
        key = jnp.where(survives[:, :, None], grouped, -jnp.inf).reshape(key.shape)
    return lax.top_k(key, top_k)[1].astype(jnp.int32)


def permute_index(
    topk_ids: Array,
    *,
    num_experts: int,
    rows: int,
    alignment: int,
    capacity: int | None,
    tile: int,
    with_m_indices: bool,
) -> tuple[Array, Array, Array | None, Array]:
    """topk_ids [T, k] -> src2dst [T, k], tiles [3, N], m_indices [rows] or None, masked_m [E].

    All int32. Rows of an expert are in (token, slot) order; `capacity` None is the contiguous
    layout. src2dst is -1 for ids outside 0..E-1 and for rows beyond `capacity`.
    """
    ids = topk_ids.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[ids].add(1)
    order = jnp.argsort(ids, stable=True)
    starts = jnp.cumsum(counts) - counts
    rank = jnp.zeros(ids.size, jnp.int32).at[order].set(jnp.arange(ids.size, dtype=jnp.int32))
    rank = rank - starts[ids]

    masked_m = counts[:num_experts]
    if capacity is None:
        segments = -(-masked_m // alignment) * alignment
        offsets, fits = jnp.cumsum(segments) - segments, ids < num_experts
    else:
        masked_m = jnp.minimum(masked_m, capacity)
        offsets = jnp.arange(num_experts, dtype=jnp.int32) * capacity
        fits = (ids < num_experts) & (rank < capacity)
    src2dst = jnp.where(fits, offsets[jnp.minimum(ids, num_experts - 1)] + rank, -1)

    per_expert = -(-masked_m // tile)
    last = jnp.cumsum(per_expert)
    index = jnp.arange(num_tiles(ids.size, num_experts, tile), dtype=jnp.int32)
    expert = jnp.searchsorted(last, index, side="right").astype(jnp.int32)
    live, e = expert < num_experts, jnp.minimum(expert, num_experts - 1)
    inside = (index - (last - per_expert)[e]) * tile
    tiles = jnp.stack([e, offsets[e] + inside, jnp.minimum(tile, masked_m[e] - inside)])
    tiles = jnp.where(live, tiles, jnp.array([[-1], [0], [0]], jnp.int32))

    m_indices = None
    if with_m_indices:
        m_indices = jnp.full(rows, -1, jnp.int32)
        m_indices = m_indices.at[jnp.where(fits, src2dst, rows)].set(ids, mode="drop")
    return src2dst.reshape(topk_ids.shape), tiles.astype(jnp.int32), m_indices, masked_m


def permute(
    x: Array,
    src2dst: Array,
    *,
    rows: int,
    slabs: int = 1,
    group: int | None = 128,
    ue8m0: bool = False,
    packed: bool = False,
    scales: Array | None = None,
    width: int | None = None,
) -> tuple[Array, Array | None]:
    """x [T, W] -> rows in the experts' order: values [rows, K], scales [slabs * G, S].

    K is `width`, by default W. x is bf16, quantised as by `quant`; or with `scales` float8_e4m3fn
    that was, a row of them for each token, [T, K / group] f32 or if `packed`
    [T, ceil(K / group / 4)] int32; or with `group` None of any dtype of 8 or 16 bits but bool, and
    scales are None. The latter two are moved bit for bit. Rows that src2dst does not name are
    unspecified.
    """
    width = x.shape[1] if width is None else width
    _check_permute(x, group, ue8m0, packed, scales, width)
    tokens = jnp.broadcast_to(jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], src2dst.shape)
    dst = jnp.where(src2dst < 0, rows, src2dst)
    dst2src = jnp.zeros(rows, jnp.int32).at[dst].set(tokens, mode="drop")
    if group is not None and scales is None:
        x, scales = quant(x[:, :width], group=group, ue8m0=ue8m0, packed=packed)
        scales = scales.T

    def gather(array):
        if array.shape[0] == 0:  # jnp finds no index legal
            return jnp.zeros((rows, array.shape[1]), array.dtype)
        return array[dst2src]

    # As bits, which XLA on a CPU does not convert on the way as it does float8.
    values = lax.bitcast_convert_type(gather(_bits(x)[:, :width]), x.dtype)
    return values, None if group is None else _in_slabs(gather(scales), slabs)


def _check_permute(
    x: Array, group: int | None, ue8m0: bool, packed: bool, scales: Array | None, width: int
) -> None:
    if width % 128 or not 0 < width <= x.shape[1]:
        raise ValueError(f"width={width}: must be a multiple of 128, at most {x.shape[1]}")
    if scales is not None and group is None:
        raise ValueError(f"scales: shape {scales.shape}, must be None with group=None")
    if group is None:
        if x.dtype == bool or jax.dtypes.itemsize_bits(x.dtype) not in (8, 16):
            raise TypeError(f"x: dtype {x.dtype}, must be of 8 or 16 bits, no bool")
        return
    checks.dtype("x", x, ("bfloat16" if scales is None else "float8_e4m3fn",))
    if scales is not None:
        _check_packed(ue8m0, packed)
        words = width // group
        checks.shape("scales", scales, (x.shape[0], -(-words // 4) if packed else words))
        checks.dtype("scales", scales, ("int32" if packed else "float32",))


def _in_slabs(scales: Array, slabs: int) -> Array:
    """[M, G] -> [slabs * G, S], S = M / slabs rounded up to 4: MN-major within a slab."""
    capacity, groups = scales.shape[0] // slabs, scales.shape[1]
    scales = scales.reshape(slabs, capacity, groups).transpose(0, 2, 1)
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -capacity % 4)))
    return scales.reshape(slabs * groups, -1)


def quant(
    x: Array,
    *,
    width: int | None = None,
    group: int = 128,
    ue8m0: bool = False,
    packed: bool = False,
) -> tuple[Array, Array]:
    """x [M, K] bf16 or f32 -> values [M, K] float8_e4m3fn, scales [G, M4], MN-major, M up to 4s.

    With `width`, values are [M, width], zeros from K on.

    scale = max(amax, 1e-10) / 448 per row and group; `ue8m0` rounds it up to a power of two. f32,
    G = K / group; `packed`: exponents in int32, group 4 * j + i as byte i (the lowest first) of
    word j, bytes past the last group 0. A NaN or Inf leaves NaN in its group's values, and 255 in
    its exponent.
    """
    _check_packed(ue8m0, packed)
    width = x.shape[1] if width is None else width
    if width < x.shape[1] or width % 128:
        raise ValueError(
            f"width={width}; it must be a multiple of 128, and K={x.shape[1]} at least"
        )
    groups = x.astype(F32).reshape(x.shape[0], x.shape[1] // group, group)
    scales = scale_of(largest(groups, -1), 448.0, ue8m0)
    values = divide(groups, scales[..., None])
    # Behind a barrier, since XLA may drop a rounding to float8 that is widened again at once.
    values = lax.optimization_barrier(jnp.clip(values, -448.0, 448.0).astype(jnp.float8_e4m3fn))
    values = jnp.pad(values.reshape(x.shape), ((0, 0), (0, width - x.shape[1])))
    return values, _in_slabs(_packed(scales) if packed else scales, 1)


def _check_packed(ue8m0: bool, packed: bool) -> None:
    if packed and not ue8m0:
        raise ValueError("packed=True, ue8m0=False; only powers of two have exponents to be packed")


def _packed(scales: Array) -> Array:
    """Powers of two [M, G] f32 -> their exponents [M, ceil(G / 4)] int32."""
    exponents = lax.bitcast_convert_type(scales, jnp.int32) >> 23
    exponents = jnp.where(jnp.isnan(scales), 255, exponents)  # whatever the sign of the NaN
    exponents = jnp.pad(exponents, ((0, 0), (0, -scales.shape[1] % 4)))
    words = exponents.reshape(scales.shape[0], -1, 4) << (8 * jnp.arange(4, dtype=jnp.int32))
    return jnp.sum(words, axis=-1, dtype=jnp.int32)


def requant(
    x: Array,
    scales: Array,
    masked_m: Array,
    output_scale: Array,
    out: Array,
    *,
    mn_major: bool = False,
) -> Array:
    """`out` with out[e, r] = x[e, r] * scales[e, r] / output_scale for the rows r < masked_m[e].

    x, out [E, M, H] float8_e4m3fn; scales [E, M, H / 128] f32, or `mn_major` [E, H / 128, S];
    masked_m [E] int32; output_scale [] or [1] f32. Beyond +-448 becomes +-448.
    """
    if mn_major:
        scales = scales[:, :, : x.shape[1]].swapaxes(1, 2)
    y = decode(x, scales, (1, 128)) * (1.0 / output_scale.reshape(()))
    y = jnp.clip(y, -448.0, 448.0).astype(out.dtype)
    live = jnp.arange(x.shape[1]) < masked_m[:, None]
    return jnp.where(live[..., None], y, out)


def spread(scales: Array, group: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Scales per group (rows, columns) -> one per element of `shape`."""
    for axis, size in zip((-2, -1), group, strict=True):
        if size > 1:
            scales = jnp.repeat(scales, size, axis=axis)
            scales = lax.slice_in_dim(scales, 0, shape[axis], axis=scales.ndim + axis)
    return scales


def decode(values: Array, scales: Array | None, shares: tuple[int, int] | None) -> Array:
    """values [.., N, K] (uint8: FP4, [.., N, K / 2]; int32: FP4 in tiles, `kernels_pallas.fp4`)
    times their scales -> [.., N, K] f32.

    scales: f32, one for `shares` (rows, columns) of values; or int32, packed UE8M0, one for each
    row and `shares[1]` columns; or None.
    """
    if values.dtype == jnp.uint8:
        nibbles = jnp.stack([values & 0xF, values >> 4], axis=-1)
        nibbles = nibbles.reshape(*values.shape[:-1], 2 * values.shape[-1])
        values = lax.bitcast_convert_type(nibbles.astype(jnp.uint4), jnp.float4_e2m1fn)
    elif values.dtype == jnp.int32:
        values = fp4.widen(values)
    values = values.astype(F32)
    if scales is None:
        return values
    if scales.dtype == jnp.int32:
        scales = unpack_ue8m0(scales, values.shape[-2], -(-values.shape[-1] // shares[1]))
    return values * spread(scales, shares, values.shape)


def divide(x: Array, y: Array) -> Array:
    """x / y, correctly rounded.

    XLA turns division by anything broadcast into multiplication by its reciprocal, an ulp away;
    behind the barrier it cannot see the broadcast. On a GPU its division itself is not correctly
    rounded: there the last bit may differ from the kernels', which are.
    """
    return x / lax.optimization_barrier(jnp.broadcast_to(y, x.shape))


def largest(x: Array, axis: int | tuple[int, ...]) -> Array:
    """The largest magnitude of f32, NaN if there is one: found by its bits, since a maximum of
    floats may drop a NaN."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis), F32)


def scale_of(amax: Array, peak: float, ue8m0: bool) -> Array:
    """max(amax, 1e-10) / peak in f32; with `ue8m0` the next power of two, exponent in 1..254."""
    scale = divide(jnp.maximum(amax, 1e-10), jnp.float32(peak))
    if not ue8m0:
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    exponent = jnp.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254)
    rounded = lax.bitcast_convert_type(exponent << 23, F32)
    # An infinite or NaN scale must stay visible in the row it belongs to.
    return jnp.where(jnp.isfinite(scale), rounded, scale)


def _silu(gate: Array, up: Array, limit: float | None) -> Array:
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(gate) * up


def _oai_swiglu(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1.0)


def _situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    return _soft_clip(gate, beta) * jax.nn.sigmoid(gate) * _soft_clip(up, linear_beta)


def _soft_clip(x: Array, by: float) -> Array:
    """by * tanh(x / by), where x / by is no number that XLA takes for 0: else x."""
    return jnp.where(jnp.abs(x) < by * 2.0**-13, x, by * jnp.tanh(x / by))


ACTIVATION = {"silu": _silu, "oai_swiglu": _oai_swiglu, "situ": _situ}


def _activate(gateup: Array, activation: str, params: tuple) -> Array:
    gate, up = jnp.split(gateup.astype(F32), 2, axis=1)
    return ACTIVATION[activation](gate, up, *params)


def act(
    gateup: Array, tiles: Array, *, tile: int, alignment: int, activation: str, params: tuple
) -> Array:
    """gateup [M, 2I] bf16 -> [M, I] bf16."""
    return _activate(gateup, activation, params).astype(gateup.dtype)


def act_quant(
    gateup: Array,
    tiles: Array,
    *,
    tile: int,
    alignment: int,
    slabs: int,
    activation: str,
    params: tuple,
    keep_fp32: bool = True,
    group: int = 128,
    ue8m0: bool = False,
    packed: bool = False,
) -> tuple[Array, Array]:
    """gateup [M, 2I] bf16 -> values [M, I] fp8, scales [slabs * G, S]; quantised as by `quant`.

    `keep_fp32`: the product is f32 until it is quantised, instead of rounded to bf16 first.
    """
    m, product = gateup.shape[0], _activate(gateup, activation, params)
    if not keep_fp32:
        product = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
    values, scales = quant(product, group=group, ue8m0=ue8m0, packed=packed)
    return values, _in_slabs(scales[:, :m].T, slabs)


def _bits(x: Array) -> Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, bits)


def gemm(
    a: Array,
    a_scales: Array | None,
    b: Array,
    b_scales: Array | None,
    tiles: Array,
    m_indices: Array | None,
    masked_m: Array | None,
    *,
    alignment: int,
    tile: int,
    slabs: int,
    expected_m: int,
    recipe_a: tuple[int, int] | None = (1, 128),
    recipe_b: tuple[int, int] | None = (128, 128),
) -> Array:
    """a [M, K] x b [E, N, K] -> [M, N] bf16; a tile's rows use its expert's b, f32 accumulation.

    recipe_a, recipe_b: (rows, columns) that share a scale, where there are scales: f32 ones, or
    int32, packed UE8M0. b in uint8 is FP4, in int32 FP4 in tiles.

    A loop over `tiles` that stops at the last real one; a tile's padding spills into rows that a
    later tile writes, or that nobody reads:
    `lax.ragged_dot` multiplies every row by every expert where it has no kernel of its own, and
    batched products copy an expert's weights once per tile.
    """
    (num_rows, k), n = a.shape, b.shape[1] * (fp4.ROWS if b.dtype == jnp.int32 else 1)
    tail = tile - alignment + -num_rows % alignment
    a = jnp.pad(a, ((0, tail), (0, 0)))
    if a_scales is not None:
        capacity, groups = num_rows // slabs, k // recipe_a[1]
        a_scales = a_scales.reshape(slabs, -1, a_scales.shape[1])
        if a_scales.dtype == jnp.int32:
            a_scales = unpack_ue8m0(a_scales, capacity, groups)
        else:
            a_scales = a_scales[:, :, :capacity].transpose(0, 2, 1)
        a_scales = jnp.pad(a_scales.reshape(num_rows, groups), ((0, tail), (0, 0)))
    # Slices are cut from bits: XLA on a CPU would convert all of a float8 array to cut one.
    a_bits, b_bits = _bits(a), _bits(b)

    def multiply(i, out):
        expert, first = tiles[0, i], tiles[1, i]
        rows = lax.dynamic_slice_in_dim(a_bits, first, tile)
        rows = lax.bitcast_convert_type(rows, a.dtype)
        weights = lax.dynamic_index_in_dim(b_bits, expert, keepdims=False)
        weights = lax.bitcast_convert_type(weights, b.dtype)
        if a_scales is not None:
            rows = decode(rows, lax.dynamic_slice_in_dim(a_scales, first, tile), recipe_a)
            scales = lax.dynamic_index_in_dim(b_scales, expert, keepdims=False)
            weights = decode(weights, scales, recipe_b)
        product = lax.dot_general(
            rows,
            weights,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=F32,
        )
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), first, 0)

    out, *_ = vary_alike(jnp.zeros((num_rows + tail, n), jnp.bfloat16), a, b, tiles)
    return lax.fori_loop(0, jnp.sum(tiles[0] >= 0), multiply, out)[:num_rows]


def unpermute(
    rows: Array,
    src2dst: Array,
    topk_weights: Array,
    shared: Array | None,
    *,
    scaling_factor: float,
) -> Array:
    """rows [M, H] bf16 -> [T, H] bf16: each token's k rows, weighted and summed in slot order.

    f32 throughout: sum, times `scaling_factor`, plus `shared` [T, H], then one rounding.
    """
    total = jnp.zeros((src2dst.shape[0], rows.shape[1]), F32)
    for slot in range(src2dst.shape[1]):
        dst = src2dst[:, slot, None]
        row = rows[jnp.maximum(dst[:, 0], 0)].astype(F32)
        total = jnp.where(dst >= 0, total + topk_weights[:, slot, None] * row, total)
    total = total * scaling_factor
    if shared is not None:
        total = total + shared.astype(F32)
    return total.astype(rows.dtype)
