"""Tree attention: who sees whom in a verification forward, as additive masks."""

import torch
from torch import Tensor

from medusa_cli.models.base import SLIDING, AttentionLayout


def tree_attention_mask(
    ancestors: Tensor,  # [N, N] bool, True where the column's node is on the row's path
    depths: Tensor,  # [N]
    rows: int,
    layout: AttentionLayout,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor] | None:
    """Masks for N tree nodes behind L = `rows` cached rows, each [1, 1, N, L + N].

    A node sees every cached row and its own ancestors: 0 where visible, the dtype's minimum
    elsewhere. A sliding window compares positions, never row numbers, since siblings share one.

    Returns:
        One mask; a mask for each layer type where the model wants that; None for a lone root,
        which needs no mask beyond the model's own causal one.
    """
    nodes, device = ancestors.shape[0], ancestors.device
    if nodes == 1:
        return None
    visible = torch.cat([ancestors.new_ones(nodes, rows), ancestors], dim=1)  # [N, L + N]
    full = _additive(visible, dtype)
    if layout.window is None:
        return dict.fromkeys(layout.layer_types, full) if layout.layer_types else full
    positions = rows + depths  # [N]
    key_positions = torch.cat([torch.arange(rows, device=device), positions])  # [L + N]
    in_window = key_positions[None, :] > positions[:, None] - layout.window
    windowed = _additive(visible & in_window, dtype)
    if not layout.layer_types:
        return windowed
    return {kind: windowed if kind == SLIDING else full for kind in layout.layer_types}


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]
