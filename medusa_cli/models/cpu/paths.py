"""The attention function that is registered with transformers: rows attend along their paths."""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from medusa_cli.models.cpu.attention import scratch_elements
from medusa_cli.models.cpu.cache import is_panels
from medusa_cli.models.cpu.jobs import attend
from medusa_cli.models.cpu.pool import Pool

NO_TABLE = np.zeros((0, 0), dtype=np.int64)


def table_of(attention_mask: Tensor | None) -> NDArray[np.int64]:
    """The path table that transformers hands on as a mask; empty where attention is causal."""
    if attention_mask is None or attention_mask.dtype is torch.bool:
        return NO_TABLE
    return attention_mask[0, 0].numpy()


class PathAttention:
    """Attention of N new rows: along paths with a table, else causal.

    Attributes:
        pool: threads that it is spread over.
        windows: where set, gains the sliding window of each call, None for none.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.windows: list[int | None] | None = None

    def __call__(
        self,
        module: nn.Module | None,
        query: Tensor,  # [1, H, N, D]
        key: Tensor,  # [1, H_kv, P, D, 8], from a `PanelCacheLayer`
        value: Tensor,  # [1, H_kv, D / 16, rows, 16]
        attention_mask: Tensor | None,  # a table [1, 1, N, depth + 3] from `tree_mask.path_table`
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """The attention's output, [1, N, H, D], and no weights.

        Keys of any other cache go to transformers' own attention, with the mask that it made.
        """
        if not is_panels(key):
            arguments |= {"scaling": scaling, "dropout": dropout}
            found = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
            return cast(tuple[Tensor, None], found)
        if self.windows is not None:
            self.windows.append(sliding_window)
        queries = query[0].transpose(0, 1).contiguous()  # [N, H, D]
        dim = queries.shape[2]
        out = torch.empty(1, *queries.shape)
        rows, padded = key.shape[2] * key.shape[4], value.shape[2] * value.shape[4]
        self.pool.reserve(scratch_elements(len(queries), rows, padded))
        attend(
            self.pool.ready(),
            self.pool.threads,
            self.pool.scratch,
            queries.numpy(),
            key[0].numpy(),
            value.data_ptr(),
            value.stride(1) * value.element_size(),
            padded,
            value.shape[3],
            table_of(attention_mask),
            sliding_window or 0,
            np.float32(dim**-0.5 if scaling is None else scaling),
            np.float32(softcap or 0),
            out[0].numpy(),
        )
        return out, None
