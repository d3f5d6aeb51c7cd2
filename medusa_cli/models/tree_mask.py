"""Who sees whom in a verification forward, in the form that the model's attention reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which masks the model's `forward` wants.

    Attributes:
        layer_types: distinct layer types when the model takes a mask for each, else empty.
        window: sliding-window width in tokens, None where no layer has one.
        paths: whether attention reads path tables instead of masks.
    """

    layer_types: tuple[str, ...]
    window: int | None
    paths: bool = False


def tree_mask(
    depths: Tensor,  # [N]
    paths: Tensor,  # [N, depth + 1], nodes from the root to each node, then that node repeated
    rows: int,
    layout: AttentionLayout,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor] | None:
    """What N tree nodes behind L = `rows` cached rows see: those rows and their own ancestors.

    Returns:
        An additive mask [1, 1, N, L + N], 0 where visible and the dtype's minimum elsewhere, or a
        path table; a dict of them for each layer type where the model wants that; None for a
        lone root, which needs no mask beyond the model's own causal one. A sliding window
        compares positions, never row numbers, since siblings share a position.
    """
    nodes, device = len(depths), depths.device
    if nodes == 1:
        return None
    if layout.paths:
        table = path_table(depths, paths, rows)
        return dict.fromkeys(layout.layer_types, table) if layout.layer_types else table
    own = ancestors(paths)
    visible = torch.cat([own.new_ones(nodes, rows), own], dim=1)  # [N, L + N]
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


def ancestors(paths: Tensor) -> Tensor:  # [N, depth + 1] -> [N, N] bool
    """True where the column's node is on the row's path, its own included."""
    nodes = len(paths)
    none = torch.zeros(nodes, nodes, dtype=torch.bool, device=paths.device)
    return none.scatter_(1, paths, True)


def path_table(
    depths: Tensor,  # [N]
    paths: Tensor,  # [N, depth + 1]
    rows: int,
) -> Tensor:  # [1, 1, N, depth + 3], integers
    """For each node: L, the length of its path, and the cache rows along it.

    It has four dimensions, so transformers hands it to attention as it is; it does not grow with
    the context as a mask does.
    """
    head = torch.stack([torch.full_like(depths, rows), depths + 1], dim=1)  # [N, 2]
    return torch.cat([head, rows + paths], dim=1)[None, None]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]
