# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention on a GPU: forward, backward of a step, and backward of all steps to the step-0 keys.

A program of the first two holds a tile of rows of one head and walks over the key blocks that any
of them sees; a program of the last holds a block of keys and walks over the rows of every step
that see any of it, for all heads that share the keys, so each gradient has one writer. As starts
and limits rise over a step's rows, what is seen is a range, and so is the part of it that is seen
whole and wants no mask (`_split`). Own keys are few and a row's alone: products by element.

Scores are kept in base 2: exp2 is the hardware's.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(-1.0e30)
"""A maximum over no scores: finite, so that less than it minus it is no NaN."""

# Slices of a stack begin anywhere: were their alignment looked at, packs would compile anew.
ANYWHERE = ["own_at", "start", "limit", "lse", "delta", "ranges"]


@triton.jit
def _load(base, stride, rows, columns, valid, D: tl.constexpr, ALL: tl.constexpr):
    """[rows, columns] of a matrix of D columns; zero where a row is not valid (ALL: all are)."""
    at = base + rows[:, None] * stride + columns[None, :]
    if columns.shape[0] == D:
        if ALL:
            return tl.load(at)
        return tl.load(at, mask=valid[:, None], other=0.0)
    inside = (columns < D)[None, :]
    if not ALL:
        inside = inside & valid[:, None]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _dot_rows(
    a, a_stride, a_rows, b, b_stride, b_rows, valid, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Each row of one matrix times a row of another, by pieces that want few registers."""
    CHUNK: tl.constexpr = min(BLOCK_D, 32)
    total = tl.zeros([valid.shape[0]], tl.float32)
    for first in range(0, BLOCK_D, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        inside = valid[:, None] & (columns < D)[None, :]
        x = tl.load(a + a_rows[:, None] * a_stride + columns[None, :], mask=inside, other=0.0)
        y = tl.load(b + b_rows[:, None] * b_stride + columns[None, :], mask=inside, other=0.0)
        total += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    return total


@triton.jit
def _store(base, stride, rows, columns, valid, value, D: tl.constexpr):
    at = base + rows[:, None] * stride + columns[None, :]
    inside = valid[:, None] & (columns < D)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _split(low, whole_low, whole_high, high, BLOCK: tl.constexpr):
    """Blocks from `low` on: how many in all, and the range of those within the whole part."""
    count = tl.cdiv(high - low, BLOCK)
    first = tl.cdiv(tl.maximum(whole_low - low, 0), BLOCK)
    last = tl.maximum((whole_high - low) // BLOCK, first)
    return count, first, last


@triton.jit
def _keys_of_tile(start, limit, first, last, BLOCK_N: tl.constexpr):
    """The first key that rows first..last see, the end, and `_split` of the blocks between."""
    low, high = tl.load(start + first).to(tl.int32), tl.load(limit + last).to(tl.int32)
    whole_low = tl.load(start + last).to(tl.int32)
    whole_high = tl.load(limit + first).to(tl.int32)
    count, whole, end = _split(low, whole_low, whole_high, high, BLOCK_N)
    return low, high, count, whole, end


@triton.jit
def _attend_block(
    q, key, value, stride, first, high, starts, limits, scale, top, total, mixed,
    columns, D: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One key block joins the running softmax of a tile of rows."""
    within = tl.arange(0, BLOCK_N)
    offset, valid = first.to(tl.int64) * stride, first + within < high
    k = _load(key + offset, stride, within, columns, valid, D, WHOLE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if not WHOLE:
        at = (first + within)[None, :]
        seen = (at >= starts[:, None]) & (at < limits[:, None])
        scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    share = tl.exp2(scores * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    v = _load(value + offset, stride, within, columns, valid, D, WHOLE)
    mixed = tl.dot(share.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(share, 1), mixed


@triton.jit(
    do_not_specialize=["n", "steps", "own_at_stride"],
    do_not_specialize_on_alignment=ANYWHERE,
)
def attend_kernel(
    query, keys, own, own_at, start, limit, out, lse,
    n, steps, query_stride, keys_stride, own_stride, own_at_stride, out_stride, lse_stride, scale,
    KV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exps of a tile of rows, for one head."""
    head, first_row = tl.program_id(0), tl.program_id(1) * BLOCK_M
    within, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid = first_row + within < n
    query += first_row.to(tl.int64) * query_stride + head * D
    half = head // GROUPS * D
    key, value = keys + half, keys + KV * D + half
    low, high, count, whole, end = _keys_of_tile(
        start, limit, first_row, tl.minimum(first_row + BLOCK_M, n) - 1, BLOCK_N
    )
    starts = tl.load(start + first_row + within, mask=valid, other=0).to(tl.int32)
    limits = tl.load(limit + first_row + within, mask=valid, other=0).to(tl.int32)
    scale *= LOG2E
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Own keys first: beside what the products keep in registers, these tiles would not fit.
    for step in range(0, steps):
        at = tl.load(own_at + step * own_at_stride + first_row + within, mask=valid, other=0)
        score = scale * _dot_rows(
            query, query_stride, within, own + half, own_stride, at, valid, D, BLOCK_D
        )
        higher = tl.maximum(top, score)
        fade, share = tl.exp2(top - higher), tl.exp2(score - higher)
        v = _load(own + KV * D + half, own_stride, at, columns, valid, D, False)
        mixed = mixed * fade[:, None] + share[:, None] * v.to(tl.float32)
        total = total * fade + share
        top = higher
    q = _load(query, query_stride, within, columns, valid, D, False)
    for block in range(whole, end):
        top, total, mixed = _attend_block(
            q, key, value, keys_stride, low + block * BLOCK_N, high, starts, limits, scale,
            top, total, mixed, columns, D, BLOCK_N, True,
        )  # fmt: skip
    for other in range(0, count - (end - whole)):
        block = tl.where(other < whole, other, other + (end - whole))
        top, total, mixed = _attend_block(
            q, key, value, keys_stride, low + block * BLOCK_N, high, starts, limits, scale,
            top, total, mixed, columns, D, BLOCK_N, False,
        )  # fmt: skip
    out += first_row.to(tl.int64) * out_stride + head * D
    _store(out, out_stride, within, columns, valid, mixed / total[:, None], D)
    lse += first_row.to(tl.int64) * lse_stride + head
    tl.store(lse + within * lse_stride, (top + tl.log2(total)) / LOG2E, mask=valid)


@triton.jit
def _query_block(
    q, given, key, value, stride, first, high, starts, limits, scale, log_sums, inner, slopes,
    columns, D: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Adds one key block's part to the (unscaled) gradient of a tile's queries."""
    within = tl.arange(0, BLOCK_N)
    offset, valid = first.to(tl.int64) * stride, first + within < high
    k = _load(key + offset, stride, within, columns, valid, D, WHOLE)
    v = _load(value + offset, stride, within, columns, valid, D, WHOLE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    share = tl.exp2(scores * scale - log_sums[:, None])  # [BLOCK_M, BLOCK_N]
    if not WHOLE:
        at = (first + within)[None, :]
        share = tl.where((at >= starts[:, None]) & (at < limits[:, None]), share, 0.0)
    slope = tl.dot(given, tl.trans(v), input_precision="ieee")
    slope = share * (slope - inner[:, None])
    return tl.dot(slope.to(k.dtype), k, slopes, input_precision="ieee")


@triton.jit(
    do_not_specialize=["n", "steps", "own_at_stride"],
    do_not_specialize_on_alignment=ANYWHERE,
)
def query_kernel(
    gradient, query, keys, own, own_at, start, limit, out, lse, delta, d_query,
    n, steps, gradient_stride, query_stride, keys_stride, own_stride, own_at_stride, out_stride,
    lse_stride, delta_stride, d_query_stride, scale,
    KV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries of one head, and delta, which the other two kernels read."""
    head, first_row = tl.program_id(0), tl.program_id(1) * BLOCK_M
    within, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid, base = first_row + within < n, first_row.to(tl.int64)
    query += base * query_stride + head * D
    gradient += base * gradient_stride + head * D
    half = head // GROUPS * D
    key, value = keys + half, keys + KV * D + half
    low, high, count, whole, end = _keys_of_tile(
        start, limit, first_row, tl.minimum(first_row + BLOCK_M, n) - 1, BLOCK_N
    )
    starts = tl.load(start + first_row + within, mask=valid, other=0).to(tl.int32)
    limits = tl.load(limit + first_row + within, mask=valid, other=0).to(tl.int32)
    given = _load(gradient, gradient_stride, within, columns, valid, D, False)
    made = _load(out + base * out_stride + head * D, out_stride, within, columns, valid, D, False)
    inner = tl.sum(given.to(tl.float32) * made, 1)
    tl.store(delta + base * delta_stride + head + within * delta_stride, inner, mask=valid)
    lse += base * lse_stride + head
    log_sums = tl.load(lse + within * lse_stride, mask=valid, other=0.0) * LOG2E
    slopes = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for step in range(0, steps):
        at = tl.load(own_at + step * own_at_stride + first_row + within, mask=valid, other=0)
        score = _dot_rows(
            query, query_stride, within, own + half, own_stride, at, valid, D, BLOCK_D
        )
        slope = _dot_rows(
            gradient, gradient_stride, within,
            own + KV * D + half, own_stride, at, valid, D, BLOCK_D,
        )  # fmt: skip
        slope = tl.exp2(score * (scale * LOG2E) - log_sums) * (slope - inner)
        k = _load(own + half, own_stride, at, columns, valid, D, False).to(tl.float32)
        slopes += slope[:, None] * k
    q = _load(query, query_stride, within, columns, valid, D, False)
    given = _load(gradient, gradient_stride, within, columns, valid, D, False)
    for block in range(whole, end):
        slopes = _query_block(
            q, given, key, value, keys_stride, low + block * BLOCK_N, high, starts, limits,
            scale * LOG2E, log_sums, inner, slopes, columns, D, BLOCK_N, True,
        )  # fmt: skip
    for other in range(0, count - (end - whole)):
        block = tl.where(other < whole, other, other + (end - whole))
        slopes = _query_block(
            q, given, key, value, keys_stride, low + block * BLOCK_N, high, starts, limits,
            scale * LOG2E, log_sums, inner, slopes, columns, D, BLOCK_N, False,
        )  # fmt: skip
    d_query += base * d_query_stride + head * D
    _store(d_query, d_query_stride, within, columns, valid, slopes * scale, D)


@triton.jit(do_not_specialize=["n", "own_at_stride"], do_not_specialize_on_alignment=ANYWHERE)
def own_kernel(
    gradient, query, own, own_at, lse, delta, d_own,
    n, gradient_stride, query_stride, own_stride, own_at_stride, lse_stride, delta_stride,
    d_own_stride, scale,
    KV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds a tile of rows' part to the gradients of their own keys and values of one step."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    half, step, columns = tl.program_id(1) * D, tl.program_id(2), tl.arange(0, BLOCK_D)
    valid = row < n
    at = tl.load(own_at + step * own_at_stride + row, mask=valid, other=0)
    row = row.to(tl.int64)
    k = _load(own + half, own_stride, at, columns, valid, D, False).to(tl.float32)
    v = _load(own + KV * D + half, own_stride, at, columns, valid, D, False).to(tl.float32)
    d_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for group in range(0, GROUPS):
        head = tl.program_id(1) * GROUPS + group
        q = _load(query + head * D, query_stride, row, columns, valid, D, False).to(tl.float32)
        given = _load(gradient + head * D, gradient_stride, row, columns, valid, D, False)
        given = given.to(tl.float32)
        log_sums = tl.load(lse + row * lse_stride + head, mask=valid, other=0.0)
        inner = tl.load(delta + row * delta_stride + head, mask=valid, other=0.0)
        share = tl.exp2((tl.sum(q * k, 1) * scale - log_sums) * LOG2E)
        slope = share * (tl.sum(given * v, 1) - inner) * scale
        d_k += slope[:, None] * q
        d_v += share[:, None] * given
    d_key, d_value = d_own + half, d_own + KV * D + half
    d_k += _load(d_key, d_own_stride, at, columns, valid, D, False)
    d_v += _load(d_value, d_own_stride, at, columns, valid, D, False)
    _store(d_key, d_own_stride, at, columns, valid, d_k, D)
    _store(d_value, d_own_stride, at, columns, valid, d_v, D)


@triton.jit
def _reach(rising, first, last, wanted):
    """For each of `wanted`, the first of rows [first, last) whose value is at least that."""
    low, high = wanted * 0 + first, wanted * 0 + last
    left = last - first
    while left > 0:
        middle = (low + high) // 2
        less = tl.load(rising + middle, mask=low < high, other=0) < wanted
        less, more = less & (low < high), (less == 0) & (low < high)
        low, high = tl.where(less, middle + 1, low), tl.where(more, middle, high)
        left = left // 2
    return low


@triton.jit(
    do_not_specialize=["first", "last", "blocks", "n"],
    do_not_specialize_on_alignment=ANYWHERE,
)
def ranges_kernel(
    start, limit, ranges, first, last, blocks, n, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr
):
    """Of one step, the rows that see any key of a block, and in between those that see all of it.

    ranges int32 [blocks, 4]: rows [0th, 3rd) see some of it, those of [1st, 2nd) all of it.
    """
    block = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    low = block * BLOCK_N
    high = tl.minimum(low + BLOCK_N, n)
    at, valid = ranges + block * 4, block < blocks
    tl.store(at, _reach(limit, first, last, low + 1), mask=valid)
    tl.store(at + 1, _reach(limit, first, last, high), mask=valid)
    tl.store(at + 2, _reach(start, first, last, low + 1), mask=valid)
    tl.store(at + 3, _reach(start, first, last, high), mask=valid)


@triton.jit
def _keys_block(
    k, v, gradient, query, lse, delta, start, limit, gradient_stride, query_stride,
    first, high, at, scale, d_k, d_v,
    columns, D: tl.constexpr, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Adds one row tile's part to the gradients of a key block, the keys' unscaled."""
    within = tl.arange(0, BLOCK_M)
    base, valid = first.to(tl.int64), first + within < high
    q = _load(query + base * query_stride, query_stride, within, columns, valid, D, WHOLE)
    given = _load(
        gradient + base * gradient_stride, gradient_stride, within, columns, valid, D, WHOLE
    )
    if WHOLE:
        log_sums = tl.load(lse + first + within)
        inner = tl.load(delta + first + within)
    else:
        log_sums = tl.load(lse + first + within, mask=valid, other=0.0)
        inner = tl.load(delta + first + within, mask=valid, other=0.0)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
    share = tl.exp2(scores * scale - (log_sums * LOG2E)[None, :])
    if not WHOLE:
        starts = tl.load(start + first + within, mask=valid, other=0).to(tl.int32)
        limits = tl.load(limit + first + within, mask=valid, other=0).to(tl.int32)
        seen = (at[:, None] >= starts[None, :]) & (at[:, None] < limits[None, :])
        share = tl.where(seen, share, 0.0)
    d_v = tl.dot(share.to(given.dtype), given, d_v, input_precision="ieee")
    slope = tl.dot(v, tl.trans(given), input_precision="ieee")
    slope = share * (slope - inner[None, :])
    d_k = tl.dot(slope.to(q.dtype), q, d_k, input_precision="ieee")
    return d_k, d_v


@triton.jit(
    do_not_specialize=["n", "m", "steps", "blocks"], do_not_specialize_on_alignment=ANYWHERE
)
def keys_kernel(
    gradient, query, keys, lse, delta, start, limit, ranges, d_keys,
    n, m, steps, blocks, gradient_stride, query_stride, keys_stride, d_keys_stride, scale,
    KV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of step-0 keys and values, over all steps and the heads that share.

    lse and delta [heads, m] of the stack's m rows: by row, a tile's are side by side.
    """
    head, block = tl.program_id(0), tl.program_id(1)
    within, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at, base = block * BLOCK_N + within, (block * BLOCK_N).to(tl.int64)
    key, value = keys + base * keys_stride + head * D, keys + base * keys_stride + (KV + head) * D
    k = _load(key, keys_stride, within, columns, at < n, D, False)
    v = _load(value, keys_stride, within, columns, at < n, D, False)
    d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    head *= GROUPS
    for step in range(0, steps):
        rows = ranges + (step * blocks + block) * 4
        low, high = tl.load(rows), tl.load(rows + 3)
        count, whole, end = _split(low, tl.load(rows + 1), tl.load(rows + 2), high, BLOCK_M)
        # Heads and tiles in one loop: a step has few tiles, and each loop's loads start anew.
        for part in range(0, (end - whole) * GROUPS):
            tile, shared = whole + part // GROUPS, head + part % GROUPS
            d_k, d_v = _keys_block(
                k, v, gradient + shared * D, query + shared * D,
                lse + shared.to(tl.int64) * m, delta + shared.to(tl.int64) * m,
                start, limit, gradient_stride, query_stride,
                low + tile * BLOCK_M, high, at, scale * LOG2E, d_k, d_v,
                columns, D, BLOCK_M, True,
            )  # fmt: skip
        for part in range(0, (count - (end - whole)) * GROUPS):
            tile, shared = part // GROUPS, head + part % GROUPS
            tile = tl.where(tile < whole, tile, tile + (end - whole))
            d_k, d_v = _keys_block(
                k, v, gradient + shared * D, query + shared * D,
                lse + shared.to(tl.int64) * m, delta + shared.to(tl.int64) * m,
                start, limit, gradient_stride, query_stride,
                low + tile * BLOCK_M, high, at, scale * LOG2E, d_k, d_v,
                columns, D, BLOCK_M, False,
            )  # fmt: skip
    d_keys += base * d_keys_stride + tl.program_id(0) * D
    _store(d_keys, d_keys_stride, within, columns, at < n, d_k * scale, D)
    _store(d_keys + KV * D, d_keys_stride, within, columns, at < n, d_v, D)
