"""Modules that take the place of stock ones on a loaded model: packed, fused, or both.

Each computes what the module that it replaces computes, up to rounding; `engine` checks that.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from medusa_cli.models.cpu import jobs, matmul, rows
from medusa_cli.models.cpu.pool import Pool


class PackedLinear(nn.Module):
    """A linear layer on packed weights.

    Attributes:
        in_features, out_features: as in `nn.Linear`.
        pool: the threads that a product is spread over.
    """

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None, pool: Pool):
        super().__init__()
        self.in_features, self.out_features, self.pool = in_features, out_features, pool
        padded = torch.zeros(-(-out_features // matmul.TILE) * matmul.TILE)
        if bias is not None:
            padded[:out_features] = bias.detach()
        self.register_buffer("bias", padded)
        self._bias = padded.numpy()

    def weight_rows(self, indices: Tensor) -> Tensor:  # [R] -> [R, K] float32
        """Rows of the weight, as they are used."""
        raise NotImplementedError

    @property
    def packed(self) -> tuple[Any, ...]:
        """What kernels read."""
        raise NotImplementedError

    def multiply(self, x: Tensor, out: Tensor) -> None:  # [N, K], [N, M']
        """out = x @ weight.T + bias, the outputs padded to whole tiles."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., M]
        """x @ weight.T + bias; the result may be a view of wider rows."""
        flat = x.reshape(-1, self.in_features)
        out = torch.empty(flat.shape[0], len(self._bias))
        self.multiply(flat.contiguous(), out)
        return out[:, : self.out_features].view(*x.shape[:-1], self.out_features)


class FloatLinear(PackedLinear):
    """Packed float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pool: Pool) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias, pool)
        self._panels = matmul.pack_float(weight.detach().numpy())
        self.register_buffer("panels", torch.from_numpy(self._panels))

    def weight_rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight."""
        return torch.from_numpy(matmul.unpack_float(self._panels, indices.numpy()))

    @property
    def packed(self) -> tuple[Any, ...]:
        """Panels, bias, inputs: what kernels read."""
        return self._panels, self._bias, self.in_features

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """out = x @ weight.T + bias, the outputs padded to whole tiles."""
        job, threads = self.pool.ready(), self.pool.threads
        jobs.matmul_float(job, threads, x.numpy(), self._panels, self._bias, out.numpy())


class Int8Linear(PackedLinear):
    """8-bit weights scaled by channel, 16-bit activations scaled by row."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pool: Pool) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias, pool)
        self._panels, self._scales = matmul.pack_int8(weight.detach().float().numpy())
        self.register_buffer("panels", torch.from_numpy(self._panels))
        self.register_buffer("scales", torch.from_numpy(self._scales))
        self._limit = matmul.activation_limit(self.in_features)

    def weight_rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, as they are used."""
        found = matmul.unpack_int8(self._panels, self._scales, indices.numpy())
        return torch.from_numpy(found[:, : self.in_features])

    @property
    def packed(self) -> tuple[Any, ...]:
        """Panels, bias, inputs, scales, limit of an activation: what kernels read."""
        return self._panels, self._bias, self.in_features, self._scales, self._limit

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """out = x @ weight.T + bias, the outputs padded to whole tiles."""
        jobs.matmul_int8(
            self.pool.ready(), self.pool.threads,
            x.numpy(), self._limit, self._panels, self._scales, self._bias, out.numpy(),
        )  # fmt: skip


class PackedEmbedding(nn.Module):
    """The embedding of a model whose LM head has the same weights: it reads them there."""

    def __init__(self, lm_head: PackedLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = lm_head.out_features, lm_head.in_features
        self._rows = lm_head.weight_rows

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., D]
        """The rows of these tokens."""
        return self._rows(ids.flatten()).view(*ids.shape, self.embedding_dim)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        """The normalised rows."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(flat)
        rows.rms_norm(flat.numpy(), self.weight.detach().numpy(), self.epsilon, out.numpy())
        return out.view(x.shape)


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, act: nn.Module, width: int) -> None:
        super().__init__()
        self.gate_up, self.down_proj, self.act_fn, self.width = gate_up, down, act, width

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        """The MLP's output."""
        both = self.gate_up(x)
        gate, up = both[..., : self.width], both[..., self.width :]
        return cast(Tensor, self.down_proj(self.act_fn(gate).mul_(up)))


class FusedAttention(nn.Module):
    """Self-attention with rotary positions: q, k and v in one product, rotated in place.

    Args:
        stock: the module that it replaces; its attributes say what the attention function is told.
        qkv: the three projections as one.
    """

    def __init__(self, stock: Any, qkv: nn.Module, attention: Any) -> None:
        super().__init__()
        self.qkv, self.o_proj = qkv, stock.o_proj
        self.q_norm: nn.Module | None = getattr(stock, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(stock, "k_norm", None)
        self.layer_idx: int = stock.layer_idx
        self.head_dim: int = stock.head_dim
        self.query_width: int = stock.q_proj.out_features
        self.key_width: int = stock.k_proj.out_features
        self.num_key_value_groups, self.is_causal = self.query_width // self.key_width, True
        self._attention = attention
        self.arguments = {
            "scaling": stock.scaling,
            "sliding_window": getattr(stock, "sliding_window", None),
            "softcap": getattr(stock, "attn_logit_softcapping", None),
        }

    def forward(
        self,
        hidden_states: Tensor,  # [1, N, D]
        position_embeddings: tuple[Tensor, Tensor],  # [1, N, rotated dimensions] each
        attention_mask: Tensor | None,
        cache: Any = None,
        **_kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention's output, [1, N, D], and no weights."""
        count = hidden_states.shape[1]
        qkv = self.qkv(hidden_states)[0]  # [N, q + k + v]
        heads = qkv.view(count, -1, self.head_dim)  # [N, H + 2 H_kv, D_head]
        q_heads, k_heads = self.query_width // self.head_dim, self.key_width // self.head_dim
        queries, keys = heads[:, :q_heads], heads[:, q_heads : q_heads + k_heads]
        if self.q_norm is not None and self.k_norm is not None:
            queries.copy_(self.q_norm(queries))
            keys.copy_(self.k_norm(keys))
        cos, sin = position_embeddings
        rows.rotate(heads.numpy(), q_heads + k_heads, cos[0].numpy(), sin[0].numpy())
        query, key, value = (
            part.transpose(0, 1)[None]  # [1, heads, N, D_head]
            for part in (queries, keys, heads[:, q_heads + k_heads :])
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, _ = self._attention(self, query, key, value, attention_mask, **self.arguments)
        return self.o_proj(out.reshape(1, count, self.query_width)), None
