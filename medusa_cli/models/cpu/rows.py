"""Work on single rows: RMS norm and rotary positions. Each row's result depends on it alone."""

import numpy as np
from numba import njit


@njit(cache=True, fastmath=True)
def rms_norm(
    x,  # [N, D]
    weight,  # [D]
    epsilon,
    out,  # [N, D]
):
    """out = x / sqrt(mean(x^2) + epsilon) * weight, row by row."""
    for i in range(x.shape[0]):
        squares = np.float32(0)
        for d in range(x.shape[1]):
            squares += x[i, d] * x[i, d]
        mean = squares / np.float32(x.shape[1])
        factor = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
        for d in range(x.shape[1]):
            out[i, d] = x[i, d] * factor * weight[d]


@njit(cache=True)
def rotate(
    x,  # [N, heads, D]
    heads,
    cos,  # [N, R], R <= D
    sin,  # [N, R]
):
    """Rotates the first R dimensions of the first `heads` heads in place, halves as pairs.

    Source: Su et al. 2021, arXiv 2104.09864, in the layout of GPT-NeoX and Llama.
    """
    half = cos.shape[1] // 2
    for i in range(x.shape[0]):
        for h in range(heads):
            for d in range(half):
                a, b = x[i, h, d], x[i, h, d + half]
                x[i, h, d] = a * cos[i, d] - b * sin[i, d]
                x[i, h, d + half] = b * cos[i, d + half] + a * sin[i, d + half]
