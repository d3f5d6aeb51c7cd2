"""The KV cache: rows that can be appended, compacted to a tree path, and cut.

It knows which token each valid row holds (`ids`), so a later prompt can reuse a common prefix. It
does not know about trees: `accept` takes row offsets.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256  # rows added at a time: the buffer follows use, and copies stay rare


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """Keys and values of one layer, [1, H, rows, D_head], in a buffer that grows with use.

    A sliding-window layer keeps all its rows too (the mask does the windowing): rewinding is exact.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes empty buffers with the states' shape, dtype and device."""
        self.keys = key_states.new_zeros((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,  # [1, H, N, D_head]
        value_states: Tensor,  # [1, H, N, D_head]
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Appends N rows and returns views of all valid rows, [1, H, rows + N, D_head]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.rows, self.rows + key_states.shape[2]
        if end > self.keys.shape[2]:
            capacity = -(-end // GROWTH) * GROWTH
            self.keys = _grown(self.keys, start, capacity)
            self.values = _grown(self.values, start, capacity)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.rows = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    @torch.inference_mode()
    def move_rows(self, sources: Sequence[int], start: int) -> None:
        """Copies the rows `sources` to `start`, `start` + 1, ..., which may overlap them."""
        for buffer in (self.keys, self.values):
            index = torch.tensor(sources, device=buffer.device)
            buffer[:, :, start : start + len(sources)] = buffer.index_select(2, index)

    def get_seq_length(self) -> int:
        """Number of valid rows."""
        return self.rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows seen by a query of this length, offset of the first row)."""
        return self.rows + query_length, 0

    def get_max_length(self) -> int:
        """-1: the buffer has no fixed size."""
        return -1

    def reset(self) -> None:
        """Forgets all rows and frees the buffers."""
        self.keys = self.values = None
        self.is_initialized = False
        self.rows = 0


class KVCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """A transformers `Cache` whose rows follow the accepted tokens.

    Attributes:
        ids: the tokens of the valid rows. During a verification the layers hold rows beyond
            them; `accept` or `keep` puts the two in step again.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeCacheLayer)
        self.ids: list[int] = []

    def append(self, ids: Sequence[int]) -> None:
        """Declares rows just written to be valid and to hold `ids`."""
        self.ids.extend(ids)

    def accept(self, path: Sequence[int], ids: Sequence[int]) -> None:
        """Keeps, of the rows just written, only those at offsets `path`, which hold `ids`.

        Args:
            path: increasing offsets from the first row just written, [A + 1].
            ids: the tokens of these rows, [A + 1].
        """
        start = len(self.ids)
        # The first rows of a path often lie where they belong: copy from the first gap on.
        moved = next((i for i, offset in enumerate(path) if offset != i), len(path))
        if moved < len(path):
            sources = [start + offset for offset in path[moved:]]
            for layer in self.layers:
                layer.move_rows(sources, start + moved)
        self.ids.extend(ids)
        self.keep(len(self.ids))

    def keep(self, rows: int) -> None:
        """Cuts the cache to its first `rows` rows, or to its valid rows if they are fewer."""
        del self.ids[rows:]
        for layer in self.layers:
            layer.rows = min(layer.rows, len(self.ids))


def _grown(buffer: Tensor, rows: int, capacity: int) -> Tensor:
    grown = buffer.new_zeros((*buffer.shape[:2], capacity, buffer.shape[3]))
    grown[:, :, :rows] = buffer[:, :, :rows]
    return grown
