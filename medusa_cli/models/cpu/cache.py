"""The KV cache layer whose keys lie as `attention` reads them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.models.cache import GROWTH, TreeCacheLayer
from medusa_cli.models.cpu.attention import move_rows, store_rows
from medusa_cli.models.cpu.matmul import TILE
from medusa_cli.models.cpu.tiles import LANES


class PanelCacheLayer(TreeCacheLayer):
    """Keys [1, H, rows / 8, D, 8]; values [1, H, D / 16, rows, 16], D padded with zeros."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        """Makes empty buffers for states of this shape."""
        self._make(key_states.shape[1], key_states.shape[3])

    def update(
        self,
        key_states: Tensor,  # [1, H, N, D]
        value_states: Tensor,  # [1, H, N, D]
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Appends N rows; returns the whole panels, and the valid rows of the values."""
        _, heads, count, dim = key_states.shape
        first = self.extend(count, heads, dim)
        store_rows(*self.arrays, key_states[0].numpy(), value_states[0].numpy(), first)
        return self.keys, self.values[:, :, :, : self.rows]

    def extend(self, count: int, heads: int, dim: int) -> int:
        """Makes room for `count` rows that the caller writes; returns the first one's number."""
        if not self.is_initialized:
            self._make(heads, dim)
        first, self.rows = self.rows, self.rows + count
        if self.rows > self.values.shape[3]:
            self._grow(self.rows)
        return first

    def lengthen(self, count: int) -> None:
        """Appends rows that hold nothing of meaning to a layer that has some already."""
        self.extend(count, self.keys.shape[1], self.keys.shape[3])

    @property
    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys [H, P, D, 8] and values [H, D / 16, rows, 16], as kernels take them."""
        return self._arrays

    def move_rows(self, sources: Sequence[int], start: int) -> None:
        """Copies the rows `sources` to `start`, `start` + 1, ..., which may overlap them."""
        move_rows(*self.arrays, np.array(sources), start)

    def _make(self, heads: int, dim: int) -> None:
        keys = torch.zeros(1, heads, 0, dim, LANES)
        self._keep(keys, torch.zeros(1, heads, -(-dim // TILE), 0, TILE))
        self.is_initialized = True

    def _keep(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self._arrays = keys[0].numpy(), values[0].numpy()

    def _grow(self, end: int) -> None:
        capacity = -(-end // GROWTH) * GROWTH
        keys, values = self.keys, self.values
        self._keep(
            keys.new_zeros(1, keys.shape[1], capacity // LANES, *keys.shape[3:]),
            values.new_zeros(*values.shape[:3], capacity, TILE),
        )
        self.keys[:, :, : keys.shape[2]] = keys
        self.values[:, :, :, : values.shape[3]] = values


def is_panels(keys: Tensor) -> bool:
    """Whether keys come from a `PanelCacheLayer`."""
    return keys.dim() == 5
