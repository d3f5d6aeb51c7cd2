"""A decoder layer as one call: x += attention(norm(x)), x += down(SiLU(gate) * up) of norm(x).

It runs the same kernels as the modules of the layer, without going back to Python between them.
"""

from typing import Any, cast

import numpy as np
import torch
from numba import njit
from numba.extending import overload
from torch import Tensor, nn

from medusa_cli.models.cache import KVCache
from medusa_cli.models.cpu import jobs, matmul, rows
from medusa_cli.models.cpu.attention import scratch_elements, store_rows
from medusa_cli.models.cpu.cache import PanelCacheLayer
from medusa_cli.models.cpu.modules import FusedAttention, FusedMLP, PackedLinear, RMSNorm
from medusa_cli.models.cpu.paths import table_of

NO_WEIGHT = np.empty(0, dtype=np.float32)


class FusedLayer(nn.Module):
    """Takes the place of a decoder layer whose parts are on the engine already.

    Args:
        stock: the layer; it still runs where the KV cache is not ours.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock
        attention: FusedAttention = stock.self_attn
        self._index, self._pool = attention.layer_idx, cast(PackedLinear, attention.qkv).pool
        self._sizes = (
            attention.query_width // attention.head_dim,
            attention.key_width // attention.head_dim,
            attention.head_dim,
        )
        norms = (stock.input_layernorm, stock.post_attention_layernorm)
        self._norms = tuple(norm.weight.detach().numpy() for norm in norms)
        self._epsilons = tuple(norm.epsilon for norm in norms)
        head_norms: tuple[Any, ...] = (attention.q_norm, attention.k_norm)
        self._head_norms = tuple(
            NO_WEIGHT if norm is None else norm.weight.detach().numpy() for norm in head_norms
        )
        self._head_epsilon = 0.0 if attention.q_norm is None else attention.q_norm.epsilon
        mlp = stock.mlp
        parts: tuple[Any, ...] = (attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj)
        self._products = tuple(part.packed for part in parts)
        self._factors = (
            np.float32(attention.arguments["scaling"]),
            np.float32(attention.arguments["softcap"] or 0),
        )
        self._window = attention.arguments["sliding_window"] or 0

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """The layer's output, [1, N, D]."""
        cache = named.get("cache")
        if not isinstance(cache, KVCache) or arguments:
            return cast(Tensor, self.stock(hidden_states, *arguments, **named))
        out = hidden_states.clone(memory_format=torch.contiguous_format)
        stored = cast(PanelCacheLayer, cache.layer(self._index))
        first = stored.extend(hidden_states.shape[1], *self._sizes[1:])
        keys, values = stored.arrays
        self._pool.reserve(
            scratch_elements(len(out[0]), values.shape[2], matmul.TILE * values.shape[1])
        )
        cos, sin = named["position_embeddings"]
        decoder_layer(
            self._pool.ready(), self._pool.threads, self._pool.scratch, out[0].numpy(),
            self._norms, self._epsilons, self._products, self._sizes, self._head_norms,
            self._head_epsilon, cos[0].numpy(), sin[0].numpy(), keys, values, first,
            table_of(named.get("attention_mask")), self._window, self._factors,
        )  # fmt: skip
        return out


def fits(layer: Any) -> bool:
    """Whether a decoder layer looks like the one that this module computes."""
    norms = (getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm"))
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedMLP):
        return False
    head_norms = {type(attention.q_norm), type(attention.k_norm)}
    known = all(isinstance(norm, RMSNorm) for norm in norms)
    silu = type(mlp.act_fn) is nn.SiLU or type(mlp.act_fn).__name__ == "SiLUActivation"
    return known and silu and head_norms in ({type(None)}, {RMSNorm})


@njit(cache=True)
def decoder_layer(
    job,
    threads,
    scratch,
    x,  # [N, D], becomes the layer's output
    norms,  # [D] twice: before attention, before the MLP
    epsilons,
    products,  # packed linear layers: q, k and v; o; gate and up; down
    sizes,  # H, H_kv, D_head
    head_norms,  # [D_head] twice: of queries, of keys; empty: none
    head_epsilon,
    cos,  # [N, rotated dimensions]
    sin,
    keys,  # [H_kv, P, D_head, LANES]
    values,  # [H_kv, D_head / TILE, rows, TILE]
    first,  # row of the cache that the first of the N tokens gets
    table,  # as `jobs.attend` takes it
    window,
    factors,  # scaling, softcap
):
    """Runs the layer over N tokens and stores their keys and values."""
    qkv, o, gate_up, down = products
    heads, kv_heads, dim = sizes
    count, hidden = x.shape
    width = (heads + 2 * kv_heads) * dim
    normed = np.empty((count, hidden), np.float32)
    rows.rms_norm(x, norms[0], epsilons[0], normed)
    parts = np.empty((count, len(qkv[1])), np.float32)
    product(job, threads, normed, qkv, parts)
    split = np.ascontiguousarray(parts[:, :width]).reshape(count, heads + 2 * kv_heads, dim)
    if len(head_norms[0]) > 0:
        rows.norm_heads(split, 0, heads, head_norms[0], head_epsilon)
        rows.norm_heads(split, heads, heads + kv_heads, head_norms[1], head_epsilon)
    rows.rotate(split, heads + kv_heads, cos, sin)
    by_head = split.transpose(1, 0, 2)
    store_rows(keys, values, by_head[heads : heads + kv_heads], by_head[heads + kv_heads :], first)
    queries = np.ascontiguousarray(split[:, :heads])
    attended = np.empty((count, heads, dim), np.float32)
    jobs.attend(
        job, threads, scratch, queries, keys, np.int64(values.ctypes.data), values.strides[0],
        matmul.TILE * values.shape[1], first + count, table, window, factors[0], factors[1],
        attended,
    )  # fmt: skip
    added = np.empty((count, len(o[1])), np.float32)
    product(job, threads, attended.reshape(count, heads * dim), o, added)
    rows.add(x, added)

    rows.rms_norm(x, norms[1], epsilons[1], normed)
    both = np.empty((count, len(gate_up[1])), np.float32)
    product(job, threads, normed, gate_up, both)
    inner = np.empty((count, down[2]), np.float32)
    jobs.silu_multiply(job, both, inner)
    added = np.empty((count, len(down[1])), np.float32)
    product(job, threads, inner, down, added)
    rows.add(x, added)


def product(job, threads, x, layer, out):
    """out = x @ weight.T + bias for a layer as `PackedLinear.packed` gives it."""
    raise NotImplementedError


@overload(product)
def _product(job, threads, x, layer, out):  # noqa: ARG001  # numba matches them by name
    if layer[0].ndim == 4:

        def int8(job, threads, x, layer, out):
            jobs.matmul_int8(job, threads, x, layer[4], layer[0], layer[3], layer[1], out)

        return int8

    def whole(job, threads, x, layer, out):
        jobs.matmul_float(job, threads, x, layer[0], layer[1], out)

    return whole
