"""The KV cache layer whose keys lie as `attention` reads them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from medusa_cli.models.cache import GROWTH, TreeCacheLayer
from medusa_cli.models.cpu.attention import move_rows, store_rows
from medusa_cli.models.cpu.matmul import TILE
from medusa_cli.models.cpu.tiles import LANES


class PanelCacheLayer(TreeCacheLayer):
    """Keys [1, H, rows / 8, D, 8]; values [1, H, rows, D'], D padded with zeros to whole tiles."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes empty buffers for states of this shape."""
        _, heads, _, dim = key_states.shape
        padded = -(-value_states.shape[3] // TILE) * TILE
        self.keys = key_states.new_zeros(1, heads, 0, dim, LANES)
        self.values = value_states.new_zeros(1, heads, 0, padded)
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,  # [1, H, N, D]
        value_states: Tensor,  # [1, H, N, D]
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Appends N rows; returns the whole panels, and the valid rows of the values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.rows, self.rows + key_states.shape[2]
        if end > self.values.shape[2]:
            self._grow(end)
        store_rows(
            self.keys[0].numpy(),
            self.values[0].numpy(),
            key_states[0].numpy(),
            value_states[0].numpy(),
            start,
        )
        self.rows = end
        return self.keys, self.values[:, :, :end]

    def move_rows(self, sources: Sequence[int], start: int) -> None:
        """Copies the rows `sources` to `start`, `start` + 1, ..., which may overlap them."""
        move_rows(self.keys[0].numpy(), self.values[0].numpy(), np.array(sources), start)

    def _grow(self, end: int) -> None:
        capacity = -(-end // GROWTH) * GROWTH
        keys, values = self.keys, self.values
        self.keys = keys.new_zeros(1, keys.shape[1], capacity // LANES, *keys.shape[3:])
        self.values = values.new_zeros(1, values.shape[1], capacity, values.shape[3])
        self.keys[:, :, : keys.shape[2]] = keys
        self.values[:, :, : values.shape[2]] = values


def is_panels(keys: Tensor) -> bool:
    """Whether keys come from a `PanelCacheLayer`."""
    return keys.dim() == 5
