"""Products and attention as jobs of a pool: what modules call, and the helpers' loop."""

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from medusa_cli.models.cpu import attention, matmul, pool, rows
from medusa_cli.models.cpu.pool import ARGUMENTS, KIND, NAPS, RUNNING, SPINS
from medusa_cli.models.cpu.tiles import floats_at

FLOAT, INT8, ATTENTION, SILU = 0, 1, 2, 3
PIECES_PER_THREAD = 4  # so that a thread that comes late still finds some


@njit(cache=True, nogil=True)
def helper(job, number):
    """Takes pieces of jobs until told to stop, or until there has been nothing to do for long."""
    idle = 0
    while idle < SPINS + NAPS and not pool.stopped(job):
        piece = pool.take(job)
        if piece >= 0:
            _work(job, piece, number)
            pool.finish(job)
            idle = 0
        else:
            idle += 1
            if idle < SPINS:
                pool.yield_core()
            else:
                pool.nap()
    pool.atomic_add(job.ctypes.data + 8 * RUNNING, -1)


@njit(cache=True)
def matmul_float(
    job,
    threads,
    x,  # [N, K] float32
    w,  # [P, K, LANES] float32
    bias,  # [P * LANES] float32
    out,  # [N, P * LANES] float32
):
    """out = x @ w.T + bias."""
    tiles = w.shape[0] // matmul.PANELS
    pieces = _pieces(tiles, threads)
    arguments = (
        _address(x), x.strides[0], x.shape[0], x.shape[1], _address(w), _address(bias),
        _address(out), out.strides[0], tiles, pieces,
    )  # fmt: skip
    _write(job, arguments)
    _run(job, FLOAT, pieces)


@njit(cache=True)
def matmul_int8(
    job,
    threads,
    x,  # [N, K] float32
    limit,  # of a 16-bit activation
    w,  # [P, K / 2, LANES, 2] int8
    scales,  # [P * LANES] float32
    bias,  # [P * LANES] float32
    out,  # [N, P * LANES] float32
):
    """out = (rows of x in 16 bits @ w.T) * scales + bias."""
    tiles = w.shape[0] // matmul.PANELS
    pieces = _pieces(tiles, threads)
    whole = np.empty((x.shape[0], 2 * w.shape[1]), np.int16)
    row_scales = np.empty(x.shape[0], np.float32)
    matmul.quantize_rows(x, limit, whole, row_scales)
    arguments = (
        _address(whole), whole.strides[0], whole.shape[0], w.shape[1], _address(w), _address(bias),
        _address(out), out.strides[0], tiles, pieces, _address(scales), _address(row_scales),
    )  # fmt: skip
    _write(job, arguments)
    _run(job, INT8, pieces)


@njit(cache=True)
def attend(
    job,
    threads,
    scratch,  # [threads, elements] float32, see `attention.scratch_elements`
    queries,  # [N, H, D]
    keys,  # [H_kv, P, D, LANES]
    values,  # address of [H_kv, D / TILE, rows, TILE] ...
    head_bytes,  # ... from one head's to the next ...
    padded,  # ... D in whole tiles
    rows,  # valid rows, those of the N tokens included
    table,  # [N, depth + 3] as `tree_mask.path_table` makes it; [0, 0]: causal
    window,  # 0: none
    scaling,
    softcap,  # 0: none
    out,  # [N, H, D]
):
    """Softmax attention of N rows along their paths, or of the last N rows of a text."""
    count, heads, dim = queries.shape
    kv_heads, width = keys.shape[0], keys.shape[1] * matmul.LANES
    at_once, units, blocks, split = attention.shares(count, heads, kv_heads, rows, threads)
    shared = units * blocks * at_once * (padded + 2) if split > 1 else 0
    results, done = np.empty(shared, np.float32), np.zeros(units, np.int64)
    arguments = (
        _address(queries), _address(keys), values, _address(table), _address(out),
        _address(scratch), scratch.strides[0], count, heads, dim, kv_heads, width,
        head_bytes, padded, rows, table.shape[1], window, at_once, blocks, split,
        _address(results), _address(done),
    )  # fmt: skip
    _write(job, arguments)
    behind = ARGUMENTS + len(arguments)
    factors = job[behind : behind + 1].view(np.float32)
    factors[0], factors[1] = scaling, softcap
    _run(job, ATTENTION, units * split)


@njit(cache=True)
def silu_multiply(
    job,
    both,  # [N, >= 2 I] float32, gate and up side by side
    out,  # [N, I]
):
    """out = SiLU(gate) * up."""
    arguments = (
        _address(both), both.shape[1], _address(out), out.shape[1], out.shape[0],
    )  # fmt: skip
    _write(job, arguments)
    _run(job, SILU, out.shape[0])


@njit
def _silu_piece(arguments, row):
    width, inner, count = arguments[1], arguments[3], arguments[4]
    both = carray(floats_at(arguments[0]), (count, width))
    out = carray(floats_at(arguments[2]), (count, inner))
    rows.silu_multiply(both[row : row + 1], out[row : row + 1])


@njit
def _pieces(tiles, threads):
    return min(tiles, PIECES_PER_THREAD * threads) if threads > 1 else 1


@njit
def _write(job, arguments):
    for i in range(len(arguments)):
        job[ARGUMENTS + i] = arguments[i]


@njit
def _address(array):
    return np.int64(array.ctypes.data)


@njit
def _run(job, kind, pieces):
    job[KIND] = kind
    pool.publish(job, pieces)
    piece = pool.take(job)
    while piece >= 0:
        _work(job, piece, 0)
        pool.finish(job)
        piece = pool.take(job)
    pool.wait(job, pieces)


@njit
def _work(job, piece, thread):
    arguments = job[ARGUMENTS:]
    if job[KIND] == FLOAT:
        matmul.float_piece(arguments, piece)
    elif job[KIND] == INT8:
        matmul.int8_piece(arguments, piece)
    elif job[KIND] == SILU:
        _silu_piece(arguments, piece)
    else:
        attention.piece(arguments, piece, thread)
