"""Matrix products on packed weights, float32 and int8, piece by piece.

Packing turns a weight [M, K] into panels of `LANES` output channels: [M / 8, K, 8] in float32, and
for int8 [M / 8, K / 2, 8, 2], two inputs side by side. M is padded with zeros to whole tiles.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from medusa_cli.models.cpu.rows import greatest_magnitude
from medusa_cli.models.cpu.tiles import LANES, PANELS, float_tile, int8_tile

Array = NDArray[Any]

TILE = LANES * PANELS  # output channels of a tile
_FLOAT_BYTES, _VECTOR_BYTES = 4, 4 * LANES

_float_1, _float_2, _float_3, _float_4 = (float_tile(rows) for rows in (1, 2, 3, 4))
_int8_1, _int8_2, _int8_3, _int8_4 = (int8_tile(rows) for rows in (1, 2, 3, 4))


@njit
def rows_at_once(left):
    """How many of the rows left the next tile takes: 4, but never leaving a single one behind."""
    return min(left, 3 if left in (5, 6) else 4)


@njit
def float_tiles(rows, x, x_row, w, w_panel, w_step, ahead, steps, start, start_row, out, out_row):
    """One tile of any number of rows; arguments as `tiles.float_tile` describes them."""
    i = 0
    while i < rows:
        n = rows_at_once(rows - i)
        a, b, c = x + i * x_row, start + i * start_row, out + i * out_row
        if n == 4:
            _float_4(a, x_row, w, w_panel, w_step, ahead, steps, b, start_row, c, out_row)
        elif n == 3:
            _float_3(a, x_row, w, w_panel, w_step, ahead, steps, b, start_row, c, out_row)
        elif n == 2:
            _float_2(a, x_row, w, w_panel, w_step, ahead, steps, b, start_row, c, out_row)
        else:
            _float_1(a, x_row, w, w_panel, w_step, ahead, steps, b, start_row, c, out_row)
        i += n
        ahead = 0  # the first rows have fetched them


@njit
def float_piece(a, piece):
    """One piece of x @ w.T + bias in float32; arguments as `jobs.matmul_float` writes them."""
    x, x_row, rows, steps, w = a[0], a[1], a[2], a[3], a[4]
    bias, out, out_row, tiles, pieces = a[5], a[6], a[7], a[8], a[9]
    panel = steps * _VECTOR_BYTES
    for tile in range(tiles * piece // pieces, tiles * (piece + 1) // pieces):
        channels = tile * PANELS * _VECTOR_BYTES
        float_tiles(
            rows, x, x_row, w + tile * PANELS * panel, panel, _VECTOR_BYTES, PANELS * panel, steps,
            bias + channels, 0, out + channels, out_row,
        )  # fmt: skip


@njit(cache=True, error_model="numpy")
def quantize_rows(
    x,  # [N, K] float32
    limit,
    quantized,  # [N, K] int16, or [N, K + 1] with a zero at the end
    scales,  # [N] float32
):
    """Scales each row by its own largest magnitude to whole numbers within `limit`."""
    for i in range(x.shape[0]):
        largest = greatest_magnitude(x[i])
        scale = np.float32(limit) / largest if largest > 0 else np.float32(0)
        scales[i] = largest / np.float32(limit)
        for k in range(x.shape[1]):
            quantized[i, k] = np.int16(np.floor(x[i, k] * scale + np.float32(0.5)))
        quantized[i, x.shape[1] :] = 0


@njit
def int8_piece(a, piece):
    """One piece of x @ w.T + bias in int8; arguments as `jobs.matmul_int8` writes them."""
    first_x, x_row, rows, steps, w = a[0], a[1], a[2], a[3], a[4]
    bias, out, out_row, tiles, pieces = a[5], a[6], a[7], a[8], a[9]
    scales, row_scales = a[10], a[11]
    panel = steps * 2 * LANES
    for tile in range(tiles * piece // pieces, tiles * (piece + 1) // pieces):
        channels = tile * PANELS * _VECTOR_BYTES
        x, r, c = first_x, row_scales, out + channels
        v, s, b = w + tile * PANELS * panel, scales + channels, bias + channels
        left, ahead = rows, PANELS * panel
        while left > 0:
            n = rows_at_once(left)
            if n == 4:
                _int8_4(x, x_row, v, panel, ahead, steps, s, r, b, c, out_row)
            elif n == 3:
                _int8_3(x, x_row, v, panel, ahead, steps, s, r, b, c, out_row)
            elif n == 2:
                _int8_2(x, x_row, v, panel, ahead, steps, s, r, b, c, out_row)
            else:
                _int8_1(x, x_row, v, panel, ahead, steps, s, r, b, c, out_row)
            x, c, r = x + n * x_row, c + n * out_row, r + n * _FLOAT_BYTES
            left, ahead = left - n, 0


def pack_float(
    weight: Array,  # [M, K] float32
) -> Array:  # [P, K, LANES]
    """A weight in panels, padded with zero channels."""
    padded = _padded(weight, weight.shape[1])
    panels = padded.reshape(-1, LANES, padded.shape[1])
    return np.ascontiguousarray(panels.transpose(0, 2, 1))


def unpack_float(
    panels: Array,  # [P, K, LANES]
    rows: Array,  # [R] channels
) -> Array:  # [R, K]
    """Rows of the weight that was packed."""
    return panels[rows // LANES, :, rows % LANES]


def pack_int8(
    weight: Array,  # [M, K] float32
) -> tuple[Array, Array]:  # [P, ceil(K / 2), LANES, 2] int8, [P * LANES] float32
    """A weight in panels of 8-bit numbers, and the scale of each channel."""
    largest = np.abs(weight).max(axis=1)
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    whole = np.rint(weight / scales[:, None]).astype(np.int8)
    padded = _padded(whole, weight.shape[1] + weight.shape[1] % 2)
    panels = padded.reshape(-1, LANES, padded.shape[1] // 2, 2)
    all_scales = np.zeros(len(padded), dtype=np.float32)
    all_scales[: len(scales)] = scales
    return np.ascontiguousarray(panels.transpose(0, 2, 1, 3)), all_scales


def unpack_int8(
    panels: Array,  # [P, K / 2, LANES, 2] int8
    scales: Array,  # [P * LANES]
    rows: Array,  # [R] channels
) -> Array:  # [R, K] float32
    """Rows of the weight that was packed, as they are used."""
    whole = panels[rows // LANES, :, rows % LANES].reshape(len(rows), -1)
    return whole.astype(np.float32) * scales[rows, None]


def activation_limit(inputs: int) -> int:
    """Largest 16-bit activation such that sums over `inputs` products cannot leave 32 bits."""
    return min(2**15 - 1, (2**31 - 1) // (127 * max(inputs, 1)))


def _padded(weight: Array, columns: int) -> Array:
    rows = -(-weight.shape[0] // TILE) * TILE
    padded = np.zeros((rows, columns), dtype=weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded
