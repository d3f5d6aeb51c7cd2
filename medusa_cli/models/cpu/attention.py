"""Attention of a few query rows over a KV cache, each row over its own keys in path order.

A tree node sees the cached rows and its ancestors. Its scores are put side by side in the order of
positions, so softmax and the sum over values go through the very steps that a lone row at that
position goes through: a node's output is bit-identical to that of plain decoding on its path.

Keys lie in panels of `LANES` rows, [H_kv, rows / 8, D, 8], so that scores are a matrix product of
`matmul`; values lie in rows, [H_kv, rows, D'], D padded with zeros to whole tiles.
"""

import numpy as np
from numba import njit, prange, types

from medusa_cli.models.cpu.matmul import TILE, float_tiles
from medusa_cli.models.cpu.tiles import LANES, PANELS, float_of_bits, multiply_add

QUERIES = 16  # at a time: query heads that share a KV head, times rows
BLOCK = 64  # rows of values at a time; they stay in the first-level cache
_F32 = types.float32


@njit(cache=True)
def store_rows(
    keys,  # [H_kv, P, D, LANES]
    values,  # [H_kv, rows, D']
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
                values[h, row, d] = new_values[h, i, d]


@njit(cache=True)
def move_rows(
    keys,  # [H_kv, P, D, LANES]
    values,  # [H_kv, rows, D']
    sources,  # [A], rising
    first,
):
    """Copies rows to `first`, `first` + 1, ...; none of them may lie before its target."""
    for h in range(values.shape[0]):
        for i in range(len(sources)):
            source, target = sources[i], first + i
            for d in range(values.shape[2]):
                values[h, target, d] = values[h, source, d]
            for d in range(keys.shape[2]):
                keys[h, target // LANES, d, target % LANES] = (
                    keys[h, source // LANES, d, source % LANES]
                )  # fmt: skip


@njit(parallel=True, cache=True)
def attend(
    queries,  # [N, H, D]
    keys,  # [H_kv, P, D, LANES]
    values,  # [H_kv, rows, D']
    starts,  # [N], the first position that each row sees
    ends,  # [N], the row behind the cached ones that each row sees
    ancestors,  # [N, N] rows of the cache, each node's path from the root down, as far as ...
    path_lengths,  # [N] ... this many; 0 where a row has no tree
    scaling,
    softcap,  # 0: none
    out,  # [N, H, D]
    threads,
):
    """Softmax attention; rows with a path must all have the same `ends`."""
    count, heads, dim = queries.shape
    kv_heads, padded = keys.shape[0], values.shape[2]
    group = heads // kv_heads
    at_once = max(1, QUERIES // group)
    chunks = (count + at_once - 1) // at_once
    tasks = kv_heads * chunks
    width = keys.shape[1] * LANES
    for t in prange(threads):
        scaled = np.empty((at_once * group, dim), np.float32)
        scores = np.empty((at_once * group, width), np.float32)
        sums = np.empty((at_once * group, padded), np.float32)
        totals = np.empty(at_once * group, np.float32)
        zeros = np.zeros(TILE, np.float32)
        for task in range(tasks * t // threads, tasks * (t + 1) // threads):
            h, first = task // chunks, task % chunks * at_once
            last = min(first + at_once, count)
            rows = (last - first) * group
            low, high, top = starts[first], ends[first], 0
            for i in range(first, last):
                low, high = min(low, starts[i]), max(high, ends[i])
                top = max(top, ends[i])
                if path_lengths[i] > 0:
                    top = max(top, ancestors[i, path_lengths[i] - 1] + 1)
                for g in range(group):
                    for d in range(dim):
                        scaled[(i - first) * group + g, d] = (
                            queries[i, h * group + g, d] * scaling
                        )  # fmt: skip
            _score(scaled, keys[h], min(low, high), top, rows, scores, zeros)
            for q in range(rows):
                i = first + q // group
                totals[q] = _weigh(
                    scores[q], min(low, high), starts[i], ends[i], high,
                    ancestors[i, : path_lengths[i]], softcap,
                )  # fmt: skip
            sums[:rows] = 0
            _gather(scores, values[h], min(low, high), high, rows, sums)
            for q in range(rows):
                i = first + q // group
                for n in range(path_lengths[i]):
                    weight = scores[q, high + n]
                    for d in range(padded):
                        sums[q, d] = multiply_add(weight, values[h, ancestors[i, n], d], sums[q, d])
                for d in range(dim):
                    out[i, h * group + q % group, d] = sums[q, d] / totals[q]


@njit
def _score(scaled, keys, low, top, rows, scores, zeros):
    """scores[q, j] = scaled[q] . key j for j from `low` (or some before it) up to `top`."""
    panel = keys.shape[1] * 4 * LANES
    for tile in range(low // TILE, (top + TILE - 1) // TILE):
        float_tiles(
            rows, scaled.ctypes.data, scaled.strides[0],
            keys.ctypes.data + tile * PANELS * panel, panel, 4 * LANES, keys.shape[1],
            zeros.ctypes.data, 0, scores.ctypes.data + tile * 4 * TILE, scores.strides[0],
        )  # fmt: skip


@njit
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
    largest = seen[0]
    for j in range(1, len(seen)):
        largest = max(largest, seen[j])
    _exponentials(seen, largest)
    total = _sum(seen)
    scores[low:start] = 0
    if end < high:
        scores[end:high] = 0
    return total


@njit
def _exponentials(x, shift):
    """x = exp(x - shift) for x <= shift, to a unit in the last place or two.

    Source: expf of the Cephes mathematical library.
    """
    for j in range(len(x)):
        v = max(x[j] - shift, _F32(-87.0))
        n = np.floor(v * _F32(1.44269504) + _F32(0.5))
        r = v - n * _F32(0.693359375) + n * _F32(2.12194440e-4)
        p = _F32(1.9875691500e-4) * r + _F32(1.3981999507e-3)
        p = p * r + _F32(8.3334519073e-3)
        p = p * r + _F32(4.1665795894e-2)
        p = p * r + _F32(1.6666665459e-1)
        p = p * r + _F32(5.0000001201e-1)
        p = p * r * r + r + _F32(1.0)
        x[j] = p * float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(fastmath=True)
def _sum(x):
    total = _F32(0)
    for j in range(len(x)):
        total += x[j]
    return total


@njit
def _gather(scores, values, low, high, rows, sums):
    """sums[q] += the values of the rows `low` to `high`, weighted."""
    row = values.strides[0]
    for block in range(low, high, BLOCK):
        steps = min(BLOCK, high - block)
        for tile in range(values.shape[1] // TILE):
            target = sums.ctypes.data + tile * 4 * TILE
            float_tiles(
                rows, scores.ctypes.data + block * 4, scores.strides[0],
                values.ctypes.data + block * row + tile * 4 * TILE, 4 * LANES, row, steps,
                target, sums.strides[0], target, sums.strides[0],
            )  # fmt: skip
