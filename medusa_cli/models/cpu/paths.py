"""The attention function that is registered with transformers: rows attend along their paths."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from medusa_cli.models.cpu.attention import attend
from medusa_cli.models.cpu.cache import is_panels


def path_attention(
    module: nn.Module | None,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, H_kv, P, D, 8], from a `PanelCacheLayer`
    value: Tensor,  # [1, H_kv, rows, D']
    attention_mask: Tensor | None,  # a table [1, 1, N, depth + 3] from `tree_mask.path_table`
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    threads: int = 1,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of N new rows, [1, N, H, D]: along paths with a table, else causal.

    Keys of any other cache go to transformers' own attention, with the mask that it made.
    """
    if not is_panels(key):
        arguments |= {"scaling": scaling, "dropout": dropout}
        found = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
        return cast(tuple[Tensor, None], found)
    queries = query[0].transpose(0, 1)  # [N, H, D]
    count, _, dim = queries.shape
    if attention_mask is None or attention_mask.dtype is torch.bool:
        ends = np.arange(value.shape[2] - count + 1, value.shape[2] + 1)
        lengths, paths = np.zeros(count, dtype=np.int64), np.zeros((count, 1), dtype=np.int64)
    else:
        table = attention_mask[0, 0].numpy()
        ends, lengths, paths = table[:, 0].copy(), table[:, 1].copy(), table[:, 2:].copy()
    starts = np.zeros(count, dtype=np.int64)
    if sliding_window is not None:
        starts = np.maximum(starts, ends + lengths - sliding_window)
    out = torch.empty(1, *queries.shape)
    attend(
        queries.numpy(),
        key[0].numpy(),
        value[0].numpy(),
        starts,
        ends,
        paths,
        lengths,
        np.float32(dim**-0.5 if scaling is None else scaling),
        np.float32(softcap or 0),
        out[0].numpy(),
        threads,
    )
    return out, None
