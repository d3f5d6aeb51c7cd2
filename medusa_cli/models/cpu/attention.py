"""Attention of a few query rows over a KV cache, each row over its own keys in path order.

A tree node sees the cached rows and its ancestors. Positions are cut into blocks of `BLOCK`. In
each block a node's scores are put side by side in the order of positions, and softmax and the sum
over values go through the very steps that a lone row at that position goes through; the blocks'
results are joined in their order. So a node's output is bit-identical to that of plain decoding
on its path, and the keys and values of a block are read once for all its queries, by any thread.
Source of the joining: Milakov and Gimelshein 2018, arXiv 1805.02867.

Keys lie in panels of `LANES` rows, [H_kv, rows / 8, D, 8], so that scores are a matrix product of
`matmul`; values lie in columns as wide as a tile, [H_kv, D / 16, rows, 16], so that each is one
stream, D padded with zeros.
"""

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]

from medusa_cli.models.cpu.matmul import TILE, float_tiles
from medusa_cli.models.cpu.pool import atomic_add
from medusa_cli.models.cpu.rows import LARGEST, exponential, greatest
from medusa_cli.models.cpu.tiles import (
    LANES,
    PANELS,
    floats_at,
    ints_at,
    multiply_add,
)

QUERIES = 32  # most of a piece
BLOCK = 128  # positions, whole tiles
AHEAD = 4096  # bytes of values that are fetched before they are needed
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


@njit
def shares(
    count,
    heads,
    kv_heads,
    rows,
    threads,
):
    """How the work is cut: queries of a piece, pieces of a block, blocks, pieces over the blocks.

    The queries of a KV head, `heads` / `kv_heads` for each row, are cut into groups. Where there
    are few groups, each block of each is a piece; else a piece goes through all blocks.
    """
    queries = count * heads // kv_heads
    groups = (queries + QUERIES - 1) // QUERIES
    at_once = (queries + groups - 1) // groups
    blocks = (rows + BLOCK - 1) // BLOCK
    units = kv_heads * groups
    return at_once, units, blocks, blocks if units < 2 * threads else 1


@njit
def scratch_elements(count, rows, padded):
    """Floats that a thread works in: scores, queries, and the results of the blocks of a piece."""
    blocks = (rows + BLOCK - 1) // BLOCK
    return QUERIES * (BLOCK + count + 2 * TILE + padded + blocks * (padded + 2))


@njit(error_model="numpy")
def piece(arguments, number, thread):
    """Some queries of one KV head over one block or all; arguments as `jobs.attend` writes them."""
    count, heads, dim, kv_heads = arguments[7], arguments[8], arguments[9], arguments[10]
    width, head_bytes, padded = arguments[11], arguments[12], arguments[13]
    columns, window, at_once = arguments[15], arguments[16], arguments[17]
    blocks, split = arguments[18], arguments[19]
    factors = arguments[22:23].view(np.float32)
    scaling, softcap = factors[0], factors[1]
    group = heads // kv_heads
    groups = (count * group + at_once - 1) // at_once
    unit = number // split
    h, first = unit // groups, unit % groups * at_once
    total = min(at_once, count * group - first)
    context = arguments[14] - count

    queries = carray(floats_at(arguments[0]), (count, heads, dim))
    keys = carray(floats_at(arguments[1] + 4 * h * width * dim), (width // LANES, dim, LANES))
    values = carray(floats_at(arguments[2] + h * head_bytes), (padded // TILE, width, TILE))
    table = carray(ints_at(arguments[3]), (count, columns))
    out = carray(floats_at(arguments[4]), (count, heads, dim))
    scratch = arguments[5] + thread * arguments[6]
    scores = carray(floats_at(scratch), (total, BLOCK))
    scratch += 4 * total * BLOCK
    tree_width = count + 2 * TILE
    tree_scores = carray(floats_at(scratch), (total, tree_width))
    scratch += 4 * total * tree_width
    scaled = carray(floats_at(scratch), (total, dim))
    scratch += 4 * total * padded
    if split > 1:
        scratch = arguments[20] + 4 * unit * blocks * at_once * (padded + 2)
    results = carray(floats_at(scratch), (blocks, total, padded + 2))

    for q in range(total):
        i, head = (first + q) // group, h * group + (first + q) % group
        for d in range(dim):
            scaled[q, d] = queries[i, head, d] * scaling
    start = number % split
    for block in range(start, start + 1 if split > 1 else blocks):
        _block(
            block, scaled, keys, values, table, context, count, window, softcap, first, group,
            scores, tree_scores, results[block],
        )  # fmt: skip
    if split == 1 or atomic_add(arguments[21] + 8 * unit, 1) == split - 1:
        for q in range(total):
            i, head = (first + q) // group, h * group + (first + q) % group
            _join(results[:, q], out[i, head])


@njit(error_model="numpy")
def _block(
    block, scaled, keys, values, table, context, count, window, softcap, first, group,
    scores, tree_scores, result,
):  # fmt: skip
    """Attention within one block: for each query the greatest score, the sum of weights, sums."""
    low = block * BLOCK
    behind = low + BLOCK
    high, on_paths = low, False
    for q in range(len(scaled)):
        _, end, length = _sight(table, (first + q) // group, context, window)
        high = max(high, min(end, behind))
        on_paths |= length > 0 and end < behind and end + length > low
    _score(scaled, keys, low, high, scores)
    tree_first = context // TILE * TILE
    if on_paths:
        _score(scaled, keys, tree_first, context + count, tree_scores)
    for q in range(len(scaled)):
        i = (first + q) // group
        start, end, length = _sight(table, i, context, window)
        seen, cached = max(start, low), max(low, min(end, behind))
        on_path = range(max(0, seen - end), min(length, behind - end))
        for n in on_path:
            scores[q, end + n - low] = tree_scores[q, table[i, 2 + n] - tree_first]
        row = scores[q, seen - low : max(seen, min(end + length, behind)) - low]
        result[q, 0], result[q, 1] = _weigh(row, softcap)
        # From here on the weights of the path stand apart from those of the cached rows.
        for n in on_path:
            tree_scores[q, n] = scores[q, end + n - low]
        scores[q, : min(seen, high) - low] = 0
        scores[q, cached - low : high - low] = 0
    sums = result[:, 2:]
    sums[:] = 0
    _gather(scores, values, low, high, sums)
    for q in range(len(scaled)):
        i = (first + q) // group
        start, end, length = _sight(table, i, context, window)
        for n in range(max(0, max(start, low) - end), min(length, behind - end)):
            weight, row = tree_scores[q, n], table[i, 2 + n]
            for tile in range(values.shape[0]):
                for d in range(TILE):
                    column = tile * TILE + d
                    sums[q, column] = multiply_add(weight, values[tile, row, d], sums[q, column])


@njit(error_model="numpy")
def _join(results, out):
    """The attention over all blocks, from what `_block` found in each."""
    largest = _F32(-np.inf)
    for block in range(len(results)):
        if results[block, 1] > 0:
            largest = max(largest, results[block, 0])
    total = _F32(0)
    out[:] = 0
    for block in range(len(results)):
        if results[block, 1] > 0:
            factor = exponential(max(results[block, 0] - largest, _F32(-LARGEST)))
            total += results[block, 1] * factor
            for d in range(len(out)):
                out[d] += results[block, 2 + d] * factor
    for d in range(len(out)):
        out[d] /= total


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
def _score(scaled, keys, low, high, scores):
    """scores[q, j] = scaled[q] . key low + j, up to key `high`; `low` begins a tile."""
    zeros = np.zeros(TILE, np.float32)
    panel = keys.shape[1] * 4 * LANES
    for tile in range(low // TILE, (high + TILE - 1) // TILE):
        float_tiles(
            len(scaled), scaled.ctypes.data, scaled.strides[0],
            keys.ctypes.data + tile * PANELS * panel, panel, 4 * LANES, PANELS * panel,
            keys.shape[1], zeros.ctypes.data, 0,
            scores.ctypes.data + 4 * (tile * TILE - low), scores.strides[0],
        )  # fmt: skip


@njit(error_model="numpy")
def _weigh(scores, softcap):
    """Turns scores into weights, exp(score - greatest); returns the greatest, and their sum."""
    if softcap > 0:
        for j in range(len(scores)):
            scores[j] = softcap * np.tanh(scores[j] / softcap)
    largest = greatest(scores)
    _exponentials(scores, largest)
    return largest, _sum(scores)


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
def _gather(weights, values, low, high, sums):
    """sums[q] += the values of the rows `low` to `high`, weighted."""
    if high == low:
        return
    row, column = values.strides[1], values.strides[0]
    for tile in range(values.shape[0]):
        target = sums.ctypes.data + tile * 4 * TILE
        float_tiles(
            len(sums), weights.ctypes.data, weights.strides[0],
            values.ctypes.data + tile * column + low * row, 4 * LANES, row, AHEAD, high - low,
            target, sums.strides[0], target, sums.strides[0],
        )  # fmt: skip
