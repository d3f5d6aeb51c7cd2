"""The KV cache: rows that can be appended, compacted to a tree path, and cut.

It knows which token each valid row holds (`ids`), so a later prompt can reuse a common prefix. It
does not know about trees: `accept` takes row offsets.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256  # rows added at a time: the buffer follows use, and copies stay rare


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, H, rows, D_head], in a buffer that grows with use.

    A sliding-window layer keeps all its rows too (the mask does the windowing): rewinding is exact.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes empty buffers with the states' shape, dtype and device."""
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
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
        self.keys = _with_room(self.keys, start, end)
        self.values = _with_room(self.values, start, end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.rows = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    @torch.inference_mode()
    def lengthen(self, count: int) -> None:
        """Appends rows that hold nothing of meaning to a layer that has some already."""
        parts = (self.keys, self.values)
        zeros = (part.new_zeros(1, part.shape[1], count, part.shape[3]) for part in parts)
        self.update(*zeros)

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
        del self.keys, self.values
        self.is_initialized = False
        self.rows = 0


class KVCache(Cache):
    """A transformers `Cache` whose rows follow the accepted tokens.

    Attributes:
        ids: the tokens of the valid rows. During a verification the layers hold rows beyond
            them; `accept` or `keep` puts the two in step again.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeCacheLayer)
        self.ids: list[int] = []

    def use_layers(self, kind: type[TreeCacheLayer]) -> None:
        """Chooses the kind of layers that an empty cache will have."""
        if not self.layers:
            self.layer_class_to_replicate = kind
        assert self.layer_class_to_replicate is kind, "a cache stays with its model"

    # How many rows and layers there are is no constant of compiled code.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self,
        key_states: Tensor,  # [1, H, N, D_head]
        value_states: Tensor,  # [1, H, N, D_head]
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Appends N rows to a layer and returns views of all its rows, [1, H, rows + N, D_head]."""
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> TreeCacheLayer:
        """A model layer's part of the cache, made when it is first asked for."""
        while len(self.layers) <= index:
            self.layers.append(self.layer_class_to_replicate())
        return cast(TreeCacheLayer, self.layers[index])

    def append(self, ids: Sequence[int]) -> None:
        """Declares rows just written to be valid and to hold `ids`."""
        self.ids.extend(ids)

    def lengthen(self, count: int) -> None:
        """Appends rows that hold nothing of meaning, so that steps on a long context can be timed.

        There must be valid rows already.
        """
        for layer in self.layers:
            layer.lengthen(count)
        self.ids.extend([0] * count)

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


def _with_room(buffer: Tensor, rows: int, end: int) -> Tensor:
    """The buffer itself, or a larger one with its first `rows` rows, such that `end` fit."""
    if end <= buffer.shape[2]:
        return buffer
    capacity = -(-end // GROWTH) * GROWTH
    grown = buffer.new_zeros((*buffer.shape[:2], capacity, buffer.shape[3]))
    grown[:, :, :rows] = buffer[:, :, :rows]
    return grown
