"""Attention of a few query rows over a KV cache, each row over its own keys in path order.

A tree node sees the cached rows and its ancestors. Its scores are put side by side in the order of
positions, so softmax and the sum over values go through the very steps that a lone row at that
position goes through: a node's output is bit-identical to that of plain decoding on its path.

Keys lie in panels of `LANES` rows, [H_kv, rows / 8, D, 8], so that scores are a matrix product of
`matmul`; values lie in columns as wide as a tile, [H_kv, D / 16, rows, 16], so that each is one
stream, D padded with zeros.
"""

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]

from medusa_cli.models.cpu.matmul import TILE, float_tiles
from medusa_cli.models.cpu.rows import LARGEST, exponential, greatest
from medusa_cli.models.cpu.tiles import (
    LANES,
    PANELS,
    floats_at,
    ints_at,
    multiply_add,
)

QUERIES = 16  # most of a piece
BLOCK = 256  # rows of values at a time; they stay in the first-level cache
_F32 = types.float32


@njit(cache=True)
def store_rows(
    keys,  # [H_kv, P, D, LANES]
    values,  # [H_kv, D / TILE, rows, TILE]
    new_keys,  # [H_kv, N, D]
    new_values,  # [H_kv, N, D]
    first,
):
    """Writes N rows from row `first` on."""
    heads, count, dim = new_keys.shape
    for h in range(heads):
        for i in range(count):
            row = first + i
            for d in range(dim):
                keys[h, row // LANES, d, row % LANES] = new_keys[h, i, d]
                values[h, d // TILE, row, d % TILE] = new_values[h, i, d]


@njit(cache=True)
def move_rows(
    keys,  # [H_kv, P, D, LANES]
    values,  # [H_kv, D / TILE, rows, TILE]
    sources,  # [A], rising
    first,
):
    """Copies rows to `first`, `first` + 1, ...; none of them may lie before its target."""
    for h in range(values.shape[0]):
        for i in range(len(sources)):
            source, target = sources[i], first + i
            for tile in range(values.shape[1]):
                for d in range(TILE):
                    values[h, tile, target, d] = values[h, tile, source, d]
            for d in range(keys.shape[2]):
                keys[h, target // LANES, d, target % LANES] = (
                    keys[h, source // LANES, d, source % LANES]
                )  # fmt: skip


def scratch_elements(rows: int, padded: int) -> int:
    """Floats that a thread works in: scores over `rows` rows, queries and sums of one piece."""
    return QUERIES * (rows + 2 * padded)


@njit
def queries_at_once(queries, kv_heads, threads):
    """How many of the queries of a KV head a piece takes: all threads shall find some."""
    shared = queries * kv_heads // (4 * threads) if threads > 1 else QUERIES
    return min(QUERIES, max(1, shared))


@njit(error_model="numpy")
def piece(arguments, number, thread):
    """Some queries of one KV head; arguments as `jobs.attend` writes them.

    A KV head has `group` queries for each row: those of the query heads that share it.
    """
    count, heads, dim, kv_heads = arguments[7], arguments[8], arguments[9], arguments[10]
    width, head_bytes, padded = arguments[11], arguments[12], arguments[13]
    columns, window, at_once = arguments[15], arguments[16], arguments[17]
    factors = arguments[18:19].view(np.float32)
    scaling, softcap = factors[0], factors[1]
    group = heads // kv_heads
    pieces = (count * group + at_once - 1) // at_once
    h, first = number // pieces, number % pieces * at_once
    total = min(at_once, count * group - first)
    context = arguments[14] - count

    queries = carray(floats_at(arguments[0]), (count, heads, dim))
    keys = carray(floats_at(arguments[1] + 4 * h * width * dim), (width // LANES, dim, LANES))
    values = carray(floats_at(arguments[2] + h * head_bytes), (padded // TILE, width, TILE))
    table = carray(ints_at(arguments[3]), (count, columns))
    out = carray(floats_at(arguments[4]), (count, heads, dim))
    scratch = arguments[5] + thread * arguments[6]
    scores = carray(floats_at(scratch), (total, width))
    sums = carray(floats_at(scratch + 4 * total * width), (total, padded))
    scaled = carray(floats_at(scratch + 4 * total * (width + padded)), (total, dim))

    low, high, top = width, 0, 0
    for q in range(total):
        i, head = (first + q) // group, h * group + (first + q) % group
        start, end, length = _sight(table, i, context, window)
        low, high = min(low, start), max(high, end)
        top = max(top, end if length == 0 else table[i, 1 + length] + 1)
        for d in range(dim):
            scaled[q, d] = queries[i, head, d] * scaling
    low = min(low, high)
    _score(scaled, keys, low, top, scores)
    sums[:] = 0
    for q in range(total):
        i, head = (first + q) // group, h * group + (first + q) % group
        start, end, length = _sight(table, i, context, window)
        # The sum of the weights waits in the output's first place.
        out[i, head, 0] = _weigh(
            scores[q], low, start, end, high, table[i, 2 : 2 + length], softcap
        )
    _gather(scores, values, low, high, sums)
    for q in range(total):
        i, head = (first + q) // group, h * group + (first + q) % group
        for n in range(_sight(table, i, context, window)[2]):
            weight, row = scores[q, high + n], table[i, 2 + n]
            for tile in range(padded // TILE):
                for d in range(TILE):
                    column = tile * TILE + d
                    sums[q, column] = multiply_add(weight, values[tile, row, d], sums[q, column])
        weights = out[i, head, 0]
        for d in range(dim):
            out[i, head, d] = sums[q, d] / weights


@njit
def _sight(table, i, context, window):
    """What row i sees: the first position, the row behind the cached ones, the path's length."""
    if table.shape[1] == 0:
        end, length = context + i + 1, 0
    else:
        end, length = table[i, 0], table[i, 1]
    start = max(0, end + length - window) if window > 0 else 0
    return start, end, length


@njit
def _score(scaled, keys, low, top, scores):
    """scores[q, j] = scaled[q] . key j for j from `low` (or some before it) up to `top`."""
    zeros = np.zeros(TILE, np.float32)
    panel = keys.shape[1] * 4 * LANES
    for tile in range(low // TILE, (top + TILE - 1) // TILE):
        float_tiles(
            len(scaled), scaled.ctypes.data, scaled.strides[0],
            keys.ctypes.data + tile * PANELS * panel, panel, 4 * LANES, keys.shape[1],
            zeros.ctypes.data, 0, scores.ctypes.data + tile * 4 * TILE, scores.strides[0],
        )  # fmt: skip


@njit(error_model="numpy")
def _weigh(scores, low, start, end, high, path, softcap):
    """Turns a row's scores into weights in the order of positions; returns their sum.

    Afterwards the weights of the path follow those of the cached rows, from `high` on, and cached
    rows that are not seen, `low` to `high`, weigh nothing.
    """
    for n in range(len(path)):
        scores[end + n] = scores[path[n]]
    seen = scores[start : end + len(path)]
    if softcap > 0:
        for j in range(len(seen)):
            seen[j] = softcap * np.tanh(seen[j] / softcap)
    _exponentials(seen, greatest(seen, 1))
    total = _sum(seen)
    scores[low:start] = 0
    if end < high:
        scores[end:high] = 0
    return total


@njit
def _exponentials(x, shift):
    """x = exp(x - shift) for x <= shift."""
    for j in range(len(x)):
        x[j] = exponential(max(x[j] - shift, _F32(-LARGEST)))


@njit(fastmath=True)
def _sum(x):
    total = _F32(0)
    for j in range(len(x)):
        total += x[j]
    return total


@njit
def _gather(scores, values, low, high, sums):
    """sums[q] += the values of the rows `low` to `high`, weighted."""
    row, column = values.strides[1], values.strides[0]
    for tile in range(values.shape[0]):
        target = sums.ctypes.data + tile * 4 * TILE
        for block in range(low, high, BLOCK):
            steps = min(BLOCK, high - block)
            float_tiles(
                len(sums), scores.ctypes.data + block * 4, scores.strides[0],
                values.ctypes.data + tile * column + block * row, 4 * LANES, row, steps,
                target, sums.strides[0], target, sums.strides[0],
            )  # fmt: skip
