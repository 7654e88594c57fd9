"""Device code of the rotary embedding; see `kconvert.kernels.triton.rope` for the formula, and for who launches it.

`UNIT` is what all strides are given in, so that the compiler knows what they are multiples of.  A head has `2 * HALF` elements from
`START` on that are rotated, and `PASS` from `PASS_START` on that are not.  `N_TYPE` is the dtype of normed heads, `ARITHMETIC`
that which torch would compute the rotation in, and `WIDE` that in which it is done.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["turn_backward", "turn_forward"]


@triton.jit
def _load_pairs(
    ptr,
    starts,
    inside,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    if IS_INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)
        mask = inside[:, None] & (both < 2 * HALF)[None, :]
        x = tl.load(ptr + starts[:, None] + both[None, :], mask=mask, other=0.0)
        x1, x2 = tl.split(tl.reshape(x, [ROWS, BLOCK, 2]))
    else:
        pairs = tl.arange(0, BLOCK)
        mask = inside[:, None] & (pairs < HALF)[None, :]
        x1 = tl.load(ptr + starts[:, None] + pairs[None, :], mask=mask, other=0.0)
        x2 = tl.load(ptr + starts[:, None] + (pairs + HALF)[None, :], mask=mask, other=0.0)
    return x1, x2


@triton.jit
def _store_pairs(
    ptr,
    places,
    inside,
    y1,
    y2,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    if IS_INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)
        mask = inside[:, None] & (both < 2 * HALF)[None, :]
        y = tl.reshape(tl.join(y1, y2), [ROWS, 2 * BLOCK])
        tl.store(ptr + places[:, None] + both[None, :], y.to(ptr.dtype.element_ty), mask=mask)
    else:
        pairs = tl.arange(0, BLOCK)
        mask = inside[:, None] & (pairs < HALF)[None, :]
        tl.store(ptr + places[:, None] + pairs[None, :], y1.to(ptr.dtype.element_ty), mask=mask)
        tl.store(ptr + places[:, None] + (pairs + HALF)[None, :], y2.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_table(
    ptr,
    start,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_HALF_TABLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """cos or sin of the pairs of one token, for the first and for the second of each."""
    pairs = tl.arange(0, BLOCK)
    if HAS_HALF_TABLE:
        first = tl.load(ptr + start + pairs, mask=pairs < HALF, other=0.0).to(WIDE)
        second = first
    elif IS_INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)
        table = tl.load(ptr + start + both, mask=both < 2 * HALF, other=0.0).to(WIDE)
        first, second = tl.split(tl.reshape(table, [BLOCK, 2]))
    else:
        first = tl.load(ptr + start + pairs, mask=pairs < HALF, other=0.0).to(WIDE)
        second = tl.load(ptr + start + pairs + HALF, mask=pairs < HALF, other=0.0).to(WIDE)
    return first[None, :], second[None, :]


@triton.jit
def _load_scale(ptr, places, inside, offset, HAS_OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr, WIDE: tl.constexpr):
    """What a normed row is multiplied by."""
    weight = tl.load(ptr + places, mask=inside, other=0.0)
    scale = weight.to(WIDE)
    if HAS_OFFSET:
        scale = scale + offset
        if CAST_FIRST:
            scale = scale.to(weight.dtype).to(WIDE)
    return scale[None, :]


@triton.jit
def _scaled(normed, scale, X_TYPE: tl.constexpr, N_TYPE: tl.constexpr, CAST_FIRST: tl.constexpr, WIDE: tl.constexpr):
    if CAST_FIRST:
        normed = normed.to(X_TYPE).to(WIDE)
    return (normed * scale).to(N_TYPE).to(WIDE)


@triton.jit
def _pair_places(START: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Where in a head the first and the second of each pair lie."""
    pairs = tl.arange(0, BLOCK)
    if IS_INTERLEAVED:
        first = START + 2 * pairs
        second = START + 2 * pairs + 1
    else:
        first = START + pairs
        second = START + HALF + pairs
    return first, second


@triton.jit
def _rotate_heads(
    x_ptr,
    weight_ptr,
    y_ptr,
    x_start,
    head_stride,
    y_start,
    y_head_stride,
    first_head,
    cos1,
    cos2,
    sin1,
    sin2,
    eps,
    offset,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PASS_START: tl.constexpr,
    PASS: tl.constexpr,
    PASS_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    WRITES_HALVES: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    N_TYPE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    WIDE: tl.constexpr,
):
    heads = first_head + tl.arange(0, ROWS)
    inside = heads < HEADS
    starts = x_start + heads * head_stride
    places = y_start + heads * y_head_stride
    x1, x2 = _load_pairs(x_ptr + START, starts, inside, HALF, ROWS, BLOCK, IS_INTERLEAVED)
    x1 = x1.to(WIDE)
    x2 = x2.to(WIDE)
    rest = tl.arange(0, PASS_BLOCK)
    mask = inside[:, None] & (rest < PASS)[None, :]
    if PASS > 0:
        passed = tl.load(x_ptr + PASS_START + starts[:, None] + rest[None, :], mask=mask, other=0.0).to(WIDE)
    if weight_ptr is not None:
        total = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        if PASS > 0:
            total += tl.sum(passed * passed, axis=1)
        rstd = tl.rsqrt(total / DIM + eps)[:, None]
        first, second = _pair_places(START, HALF, BLOCK, IS_INTERLEAVED)
        is_pair = tl.arange(0, BLOCK) < HALF
        scale1 = _load_scale(weight_ptr, first, is_pair, offset, HAS_OFFSET, CAST_FIRST, WIDE)
        scale2 = _load_scale(weight_ptr, second, is_pair, offset, HAS_OFFSET, CAST_FIRST, WIDE)
        x1 = _scaled(x1 * rstd, scale1, x_ptr.dtype.element_ty, N_TYPE, CAST_FIRST, WIDE)
        x2 = _scaled(x2 * rstd, scale2, x_ptr.dtype.element_ty, N_TYPE, CAST_FIRST, WIDE)
        if PASS > 0:
            scale = _load_scale(weight_ptr, PASS_START + rest, rest < PASS, offset, HAS_OFFSET, CAST_FIRST, WIDE)
            passed = _scaled(passed * rstd, scale, x_ptr.dtype.element_ty, N_TYPE, CAST_FIRST, WIDE)
    y1 = ((x1 * cos1).to(ARITHMETIC).to(WIDE) - (x2 * sin1).to(ARITHMETIC).to(WIDE)).to(ARITHMETIC)
    y2 = ((x2 * cos2).to(ARITHMETIC).to(WIDE) + (x1 * sin2).to(ARITHMETIC).to(WIDE)).to(ARITHMETIC)
    _store_pairs(y_ptr + START, places, inside, y1, y2, HALF, ROWS, BLOCK, IS_INTERLEAVED and not WRITES_HALVES)
    if PASS > 0:
        y_places = y_ptr + PASS_START + places[:, None] + rest[None, :]
        tl.store(y_places, passed.to(y_ptr.dtype.element_ty), mask=mask)


_STRIDES = ["num_tokens", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head"]
_TABLE_STRIDES = ["cos_batch", "cos_token", "sin_batch", "sin_token"]


@triton.jit(do_not_specialize=[*_STRIDES, *_TABLE_STRIDES])
def turn_forward(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_out_ptr,
    k_out_ptr,
    num_tokens,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    eps,
    offset,
    UNIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PASS_START: tl.constexpr,
    PASS: tl.constexpr,
    PASS_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    WRITES_HALVES: tl.constexpr,
    HAS_HALF_TABLE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    N_TYPE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    WIDE: tl.constexpr,
    K_HEADS_FIRST: tl.constexpr,
):
    """Program (i, j) turns block j of the heads of token i, those of q first.

    `*_out` are contiguous with heads behind tokens; that of k with tokens behind heads where `K_HEADS_FIRST`.
    """
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    cos_start = (batch * cos_batch + token * cos_token) * UNIT
    sin_start = (batch * sin_batch + token * sin_token) * UNIT
    cos1, cos2 = _load_table(cos_ptr, cos_start, HALF, BLOCK, IS_INTERLEAVED, HAS_HALF_TABLE, WIDE)
    sin1, sin2 = _load_table(sin_ptr, sin_start, HALF, BLOCK, IS_INTERLEAVED, HAS_HALF_TABLE, WIDE)
    block = tl.program_id(1)
    NUM_Q: tl.constexpr = (Q_HEADS + Q_ROWS - 1) // Q_ROWS
    if block < NUM_Q:
        _rotate_heads(
            q_ptr,
            q_weight_ptr,
            q_out_ptr,
            (batch * q_batch + token * q_token) * UNIT,
            q_head.to(tl.int64) * UNIT,
            row * (Q_HEADS * DIM),
            DIM,
            block * Q_ROWS,
            cos1,
            cos2,
            sin1,
            sin2,
            eps,
            offset,
            Q_HEADS,
            Q_ROWS,
            DIM,
            START,
            HALF,
            BLOCK,
            PASS_START,
            PASS,
            PASS_BLOCK,
            IS_INTERLEAVED,
            WRITES_HALVES,
            HAS_OFFSET,
            CAST_FIRST,
            N_TYPE,
            ARITHMETIC,
            WIDE,
        )
    else:
        if K_HEADS_FIRST:
            k_start = (batch * K_HEADS * num_tokens + token) * DIM
            k_out_head = num_tokens.to(tl.int64) * DIM
        else:
            k_start = row * (K_HEADS * DIM)
            k_out_head = tl.full([], DIM, tl.int64)
        _rotate_heads(
            k_ptr,
            k_weight_ptr,
            k_out_ptr,
            (batch * k_batch + token * k_token) * UNIT,
            k_head.to(tl.int64) * UNIT,
            k_start,
            k_out_head,
            (block - NUM_Q) * K_ROWS,
            cos1,
            cos2,
            sin1,
            sin2,
            eps,
            offset,
            K_HEADS,
            K_ROWS,
            DIM,
            START,
            HALF,
            BLOCK,
            PASS_START,
            PASS,
            PASS_BLOCK,
            IS_INTERLEAVED,
            WRITES_HALVES,
            HAS_OFFSET,
            CAST_FIRST,
            N_TYPE,
            ARITHMETIC,
            WIDE,
        )


@triton.jit
def _turn_back(
    dy_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    parts_ptr,
    num_rows,
    num_tokens,
    dy_batch,
    dy_token,
    dy_head,
    x_batch,
    x_token,
    x_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    block,
    num_blocks,
    eps,
    offset,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PASS_START: tl.constexpr,
    PASS: tl.constexpr,
    PASS_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    WRITES_HALVES: tl.constexpr,
    HAS_HALF_TABLE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    N_TYPE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    WIDE: tl.constexpr,
):
    heads = block * ROWS + tl.arange(0, ROWS)
    inside = heads < HEADS
    rest = tl.arange(0, PASS_BLOCK)
    mask = inside[:, None] & (rest < PASS)[None, :]
    is_pair = tl.arange(0, BLOCK) < HALF
    first, second = _pair_places(START, HALF, BLOCK, IS_INTERLEAVED)
    if weight_ptr is not None:
        scale1 = _load_scale(weight_ptr, first, is_pair, offset, HAS_OFFSET, CAST_FIRST, WIDE)
        scale2 = _load_scale(weight_ptr, second, is_pair, offset, HAS_OFFSET, CAST_FIRST, WIDE)
        scale = _load_scale(weight_ptr, PASS_START + rest, rest < PASS, offset, HAS_OFFSET, CAST_FIRST, WIDE)
        dweight1 = tl.zeros([ROWS, BLOCK], dtype=WIDE)
        dweight2 = tl.zeros([ROWS, BLOCK], dtype=WIDE)
        dweight = tl.zeros([ROWS, PASS_BLOCK], dtype=WIDE)
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        batch = row // num_tokens
        token = row % num_tokens
        cos_start = (batch * cos_batch + token * cos_token) * UNIT
        sin_start = (batch * sin_batch + token * sin_token) * UNIT
        cos1, cos2 = _load_table(cos_ptr, cos_start, HALF, BLOCK, IS_INTERLEAVED, HAS_HALF_TABLE, WIDE)
        sin1, sin2 = _load_table(sin_ptr, sin_start, HALF, BLOCK, IS_INTERLEAVED, HAS_HALF_TABLE, WIDE)
        dy_starts = (batch * dy_batch + token * dy_token + heads * dy_head.to(tl.int64)) * UNIT
        places = row * (HEADS * DIM) + heads * DIM
        dy1, dy2 = _load_pairs(
            dy_ptr + START, dy_starts, inside, HALF, ROWS, BLOCK, IS_INTERLEAVED and not WRITES_HALVES
        )
        dy1 = dy1.to(ARITHMETIC).to(WIDE)
        dy2 = dy2.to(ARITHMETIC).to(WIDE)
        dx1 = (dy1 * cos1).to(ARITHMETIC).to(WIDE) + (dy2 * sin2).to(ARITHMETIC).to(WIDE)
        dx2 = (dy2 * cos2).to(ARITHMETIC).to(WIDE) - (dy1 * sin1).to(ARITHMETIC).to(WIDE)
        if PASS > 0:
            dy_places = dy_ptr + PASS_START + dy_starts[:, None] + rest[None, :]
            dpassed = tl.load(dy_places, mask=mask, other=0.0).to(WIDE)
        if weight_ptr is not None:
            starts = (batch * x_batch + token * x_token + heads * x_head.to(tl.int64)) * UNIT
            x1, x2 = _load_pairs(x_ptr + START, starts, inside, HALF, ROWS, BLOCK, IS_INTERLEAVED)
            x1 = x1.to(WIDE)
            x2 = x2.to(WIDE)
            total = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
            if PASS > 0:
                x_places = x_ptr + PASS_START + starts[:, None] + rest[None, :]
                passed = tl.load(x_places, mask=mask, other=0.0).to(WIDE)
                total += tl.sum(passed * passed, axis=1)
            rstd = tl.rsqrt(total / DIM + eps)[:, None]
            dx1 = dx1.to(N_TYPE).to(WIDE)
            dx2 = dx2.to(N_TYPE).to(WIDE)
            x1 = x1 * rstd
            x2 = x2 * rstd
            if CAST_FIRST:
                dweight1 += dx1 * x1.to(x_ptr.dtype.element_ty).to(WIDE)
                dweight2 += dx2 * x2.to(x_ptr.dtype.element_ty).to(WIDE)
            else:
                dweight1 += dx1 * x1
                dweight2 += dx2 * x2
            dx1 = dx1 * scale1
            dx2 = dx2 * scale2
            mean = tl.sum(dx1 * x1, axis=1) + tl.sum(dx2 * x2, axis=1)
            if PASS > 0:
                passed = passed * rstd
                if CAST_FIRST:
                    dweight += dpassed * passed.to(x_ptr.dtype.element_ty).to(WIDE)
                else:
                    dweight += dpassed * passed
                dpassed = dpassed * scale
                mean += tl.sum(dpassed * passed, axis=1)
            mean = (mean / DIM)[:, None]
            dx1 = (dx1 - x1 * mean) * rstd
            dx2 = (dx2 - x2 * mean) * rstd
            if PASS > 0:
                dpassed = (dpassed - passed * mean) * rstd
        _store_pairs(dx_ptr + START, places, inside, dx1, dx2, HALF, ROWS, BLOCK, IS_INTERLEAVED)
        if PASS > 0:
            dx_places = dx_ptr + PASS_START + places[:, None] + rest[None, :]
            tl.store(dx_places, dpassed.to(dx_ptr.dtype.element_ty), mask=mask)
    if weight_ptr is not None:
        part = parts_ptr + (tl.program_id(0).to(tl.int64) * num_blocks + block) * DIM
        tl.store(part + first, tl.sum(dweight1, axis=0), mask=is_pair)
        tl.store(part + second, tl.sum(dweight2, axis=0), mask=is_pair)
        if PASS > 0:
            tl.store(part + PASS_START + rest, tl.sum(dweight, axis=0), mask=rest < PASS)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "dq_batch",
        "dq_token",
        "dq_head",
        "dk_batch",
        "dk_token",
        "dk_head",
        *_STRIDES,
        *_TABLE_STRIDES,
    ]
)
def turn_backward(
    dq_out_ptr,
    dk_out_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    dq_ptr,
    dk_ptr,
    q_parts_ptr,
    k_parts_ptr,
    num_rows,
    num_tokens,
    dq_batch,
    dq_token,
    dq_head,
    dk_batch,
    dk_token,
    dk_head,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    eps,
    offset,
    UNIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PASS_START: tl.constexpr,
    PASS: tl.constexpr,
    PASS_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    WRITES_HALVES: tl.constexpr,
    HAS_HALF_TABLE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    N_TYPE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (i, j) goes through tokens i, i + number of programs, ...; parts are one row of the head's size for each program."""
    block = tl.program_id(1)
    NUM_Q: tl.constexpr = (Q_HEADS + Q_ROWS - 1) // Q_ROWS
    NUM_K: tl.constexpr = (K_HEADS + K_ROWS - 1) // K_ROWS
    if block < NUM_Q:
        _turn_back(
            dq_out_ptr,
            q_ptr,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            dq_ptr,
            q_parts_ptr,
            num_rows,
            num_tokens,
            dq_batch,
            dq_token,
            dq_head,
            q_batch,
            q_token,
            q_head,
            cos_batch,
            cos_token,
            sin_batch,
            sin_token,
            block,
            NUM_Q,
            eps,
            offset,
            UNIT,
            Q_HEADS,
            Q_ROWS,
            DIM,
            START,
            HALF,
            BLOCK,
            PASS_START,
            PASS,
            PASS_BLOCK,
            IS_INTERLEAVED,
            WRITES_HALVES,
            HAS_HALF_TABLE,
            HAS_OFFSET,
            CAST_FIRST,
            N_TYPE,
            ARITHMETIC,
            WIDE,
        )
    else:
        _turn_back(
            dk_out_ptr,
            k_ptr,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            dk_ptr,
            k_parts_ptr,
            num_rows,
            num_tokens,
            dk_batch,
            dk_token,
            dk_head,
            k_batch,
            k_token,
            k_head,
            cos_batch,
            cos_token,
            sin_batch,
            sin_token,
            block - NUM_Q,
            NUM_K,
            eps,
            offset,
            UNIT,
            K_HEADS,
            K_ROWS,
            DIM,
            START,
            HALF,
            BLOCK,
            PASS_START,
            PASS,
            PASS_BLOCK,
            IS_INTERLEAVED,
            WRITES_HALVES,
            HAS_HALF_TABLE,
            HAS_OFFSET,
            CAST_FIRST,
            N_TYPE,
            ARITHMETIC,
            WIDE,
        )
