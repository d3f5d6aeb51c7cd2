"""The base model: a stock transformers class behind one `forward`.

This module knows shapes, devices, end-of-sequence ids and what the model's attention layers look
like. It does not know about heads, trees or sampling.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from medusa_cli.errors import UnsupportedModelError
from medusa_cli.models.cache import KVCache, TreeCacheLayer
from medusa_cli.models.tree_mask import FULL, SLIDING, AttentionLayout, tree_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_BACKENDS = ("sdpa", "eager")
PREFILL_ROWS = 512  # at a time: bounds the memory of a long prompt


class Engine:
    """What computes the model's forward: torch alone, here; the CPU engine is a subclass.

    Attributes:
        name: as reports call it.
        paths: whether its attention reads path tables instead of masks.
        own_threads: it spreads work over threads itself; torch then gets one.
        cache_layer: what its attention reads keys and values from.
        quantized: how it stores linear layers, None: as the model's dtype says.
    """

    name = "torch"
    quantized: str | None = None
    paths = False
    own_threads = False
    cache_layer = TreeCacheLayer

    def pack(self, module: nn.Module) -> nn.Module:
        """Puts the linear layers of a module, or a linear layer itself, on the engine."""
        return module

    def weight_rows(self, linear: nn.Module, rows: Tensor) -> Tensor:  # [R] -> [R, K]
        """Rows of a linear layer's weight."""
        return cast(Tensor, linear.weight).detach()[rows]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What one forward gives for its N rows (one row after a prefill)."""

    hidden: Tensor  # [N, D], the state that the LM head read
    logits: Tensor  # [N, V], as the model returned them


class BaseModel:
    """A loaded causal language model.

    Attributes:
        module: the stock transformers module, in eval mode; an engine may have replaced parts.
        engine: what computes its forward.
        layout: which masks it takes.
        context_length: most positions it can hold, or None when the config does not say.
        eos_ids: union of the end-of-sequence ids that its configs name.

    Raises:
        UnsupportedModelError: rows of its state cannot be rolled back, or its attention backend
            does not take a mask as it is.
    """

    def __init__(self, module: "PreTrainedModel", engine: Engine | None = None) -> None:
        self.module, self.engine = module.eval(), engine or Engine()
        config = module.config.get_text_config()
        self.layout = _attention_layout(module, config, self.engine)
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.eos_ids = eos_ids(module.generation_config, config)
        self.embedding: nn.Module = module.get_input_embeddings()
        self.lm_head: nn.Module = module.get_output_embeddings()
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.vocab_size: int = self.lm_head.out_features
        self.hidden_size = int(config.hidden_size)
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def precision(self) -> str:
        """In which numbers the weights are stored, in a word."""
        return self.engine.quantized or str(self.dtype).removeprefix("torch.")

    def parameter_bytes(self) -> int:
        """Memory held by the weights, in bytes."""
        tensors = {t.data_ptr(): t for t in self.module.state_dict().values()}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: KVCache) -> ForwardOutput:
        """Appends a prompt to the cache and returns its last row only.

        Args:
            ids: [S], the tokens that are not in the cache yet.
            cache: gains S rows.
        """
        for chunk in torch.split(ids, PREFILL_ROWS):
            output = self._forward(chunk, self._next_positions(chunk, cache), None, cache, 1)
        return output

    @torch.inference_mode()
    def verify(
        self,
        tokens: Tensor,  # [N]
        depths: Tensor,  # [N]
        paths: Tensor,  # [N, depth + 1], nodes from the root to each node, then that node repeated
        cache: KVCache,
    ) -> ForwardOutput:
        """Runs the N nodes of a tree in one forward; the cache gains N rows."""
        rows = cache.get_seq_length()
        mask = tree_mask(depths, paths, rows, self.layout, self.dtype)
        return self._forward(tokens, rows + depths, mask, cache, logits_to_keep=0)

    @torch.inference_mode()
    def extend(
        self,
        ids: Tensor,  # [N], the tokens behind those in the cache
        cache: KVCache,
    ) -> ForwardOutput:
        """Reads N tokens of a text, each with its logits; the cache gains N rows."""
        return self._forward(ids, self._next_positions(ids, cache), None, cache, 0)

    @staticmethod
    def _next_positions(ids: Tensor, cache: KVCache) -> Tensor:  # [N] -> [N]
        start = cache.get_seq_length()
        return torch.arange(start, start + len(ids), device=ids.device)

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        cache: KVCache,
        logits_to_keep: int,
    ) -> ForwardOutput:
        hidden: list[Tensor] = []
        cache.use_layers(self.engine.cache_layer)

        def capture(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            hidden.append(arguments[0])  # [1, N, D]

        handle = self.lm_head.register_forward_pre_hook(capture)
        try:
            with _torch_threads(1 if self.engine.own_threads else None):
                output = self.module(
                    input_ids=ids[None],
                    position_ids=positions[None],
                    attention_mask=mask,
                    use_cache=True,
                    logits_to_keep=logits_to_keep,
                    **{self._cache_argument: cache},
                )
        finally:
            handle.remove()
        return ForwardOutput(hidden=hidden[0][0], logits=output.logits[0])


def eos_ids(*configs: Any) -> frozenset[int]:
    """Union of `eos_token_id` over configs, each an int, a list of ints or absent."""
    found: set[int] = set()
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    """Two thread pools that wait actively for work would take the cores from each other."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attention_layout(module: "PreTrainedModel", config: Any, engine: Engine) -> AttentionLayout:
    name = type(module).__name__
    layer_types = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
    unknown = [kind for kind in layer_types if kind not in (FULL, SLIDING)]
    if unknown or getattr(module, "_is_stateful", False):
        kinds = ", ".join(unknown) or "recurrent"
        raise UnsupportedModelError(
            f"{name} has {kinds} layers: their state cannot be rolled back to an accepted path.\n"
            "Choose a model with full or sliding-window attention only."
        )
    backend = module.config._attn_implementation
    if not engine.paths and backend not in ATTENTION_BACKENDS:
        raise UnsupportedModelError(
            f"{name} uses the attention backend '{backend}', which does not take tree masks.\n"
            f"Load it with attn_implementation one of {', '.join(ATTENTION_BACKENDS)}."
        )
    return AttentionLayout(layer_types, getattr(config, "sliding_window", None), engine.paths)
