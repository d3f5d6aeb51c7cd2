"""Work on single rows: norms, rotary positions, activations. Each row's result is its own."""

import numpy as np
from numba import njit, types

from medusa_cli.models.cpu.tiles import float_of_bits, multiply_add

_F32 = types.float32
LARGEST = 87.0  # float32's exponential stays finite and normal up to here, in both directions


@njit(error_model="numpy")
def exponential(x):
    """exp(x) for |x| <= LARGEST, to a unit in the last place or two, in code that vectorises.

    Source: expf of the Cephes mathematical library.
    """
    n = np.floor(multiply_add(x, _F32(1.44269504), _F32(0.5)))
    r = multiply_add(n, _F32(-0.693359375), x)
    r = multiply_add(n, _F32(2.12194440e-4), r)
    p = multiply_add(_F32(1.9875691500e-4), r, _F32(1.3981999507e-3))
    p = multiply_add(p, r, _F32(8.3334519073e-3))
    p = multiply_add(p, r, _F32(4.1665795894e-2))
    p = multiply_add(p, r, _F32(1.6666665459e-1))
    p = multiply_add(p, r, _F32(5.0000001201e-1))
    p = multiply_add(p, r * r, r) + _F32(1.0)
    return p * float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


# The bits of floats, read as whole numbers, rise as their magnitudes do, and whole numbers are
# compared in code that vectorises.
_MAGNITUDE, _LEAST = np.int32(2**31 - 1), np.int32(-(2**31))


@njit
def greatest(x):
    """The greatest of float32 numbers; nan for none."""
    bits, found = x.view(np.int32), _LEAST
    for i in range(len(bits)):
        falling = (bits[i] >> np.int32(31)) & _MAGNITUDE
        key = np.int32(bits[i] ^ falling)
        found = key if key > found else found  # noqa: FURB136  # max() would widen them
    return float_of_bits(np.int32(found ^ ((found >> np.int32(31)) & _MAGNITUDE)))


@njit
def greatest_magnitude(x):
    """The greatest |x| of float32 numbers; 0 for none."""
    bits, found = x.view(np.int32), np.int32(0)
    for i in range(len(bits)):
        magnitude = np.int32(bits[i] & _MAGNITUDE)
        found = magnitude if magnitude > found else found  # noqa: FURB136
    return float_of_bits(found)


@njit(cache=True, fastmath=True, error_model="numpy")
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


@njit(cache=True, fastmath=True, error_model="numpy")
def norm_heads(
    x,  # [N, heads, D]
    first,
    last,
    weight,  # [D]
    epsilon,
):
    """`rms_norm` of each of the heads `first` to `last`, in place."""
    for i in range(x.shape[0]):
        rms_norm(x[i, first:last], weight, epsilon, x[i, first:last])


@njit(cache=True, error_model="numpy")
def silu_multiply(
    both,  # [N, >= 2 I], gate and up side by side
    out,  # [N, I]
):
    """out = SiLU(gate) * up."""
    width = out.shape[1]
    for i in range(out.shape[0]):
        for d in range(width):
            gate = both[i, d]
            shrunk = min(max(-gate, _F32(-LARGEST)), _F32(LARGEST))
            out[i, d] = gate / (_F32(1.0) + exponential(shrunk)) * both[i, width + d]


@njit(cache=True)
def add(
    x,  # [N, D]
    y,  # [N, >= D]
):
    """x += y."""
    for i in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[i, d] += y[i, d]
