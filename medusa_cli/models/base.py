"""The base model: a stock transformers class behind one `forward`.

This module knows shapes, devices, end-of-sequence ids and what the model's attention layers look
like. It does not know about heads, trees or sampling.
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from medusa_cli.errors import UnsupportedModelError
from medusa_cli.models.cache import KVCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_BACKENDS = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which masks the model's `forward` wants.

    Attributes:
        layer_types: distinct layer types when the model takes a mask for each, else empty.
        window: sliding-window width in tokens, None where no layer has one.
    """

    layer_types: tuple[str, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What one forward gives for its N rows (one row after a prefill)."""

    hidden: Tensor  # [N, D], the state that the LM head read
    logits: Tensor  # [N, V], as the model returned them


class BaseModel:
    """A loaded causal language model.

    Attributes:
        module: the stock transformers module, in eval mode.
        layout: which masks it takes.
        context_length: most positions it can hold, or None when the config does not say.
        eos_ids: union of the end-of-sequence ids that its configs name.

    Raises:
        UnsupportedModelError: rows of its state cannot be rolled back, or its attention backend
            does not take a mask as it is.
    """

    def __init__(self, module: "PreTrainedModel") -> None:
        self.module = module.eval()
        config = module.config.get_text_config()
        self.layout = _attention_layout(module, config)
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.eos_ids = eos_ids(module.generation_config, config)
        self.embedding: nn.Module = module.get_input_embeddings()
        self.lm_head: nn.Module = module.get_output_embeddings()
        weight = cast(Tensor, self.embedding.weight)
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size = cast(Tensor, self.lm_head.weight).shape[0]
        self.hidden_size = int(config.hidden_size)
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def parameter_bytes(self) -> int:
        """Memory held by the weights, in bytes."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: KVCache) -> ForwardOutput:
        """Appends a prompt to the cache and returns its last row only.

        Args:
            ids: [S], the tokens that are not in the cache yet.
            cache: gains S rows.
        """
        start = cache.get_seq_length()
        positions = torch.arange(start, start + ids.shape[0], device=ids.device)
        return self._forward(ids, positions, None, cache, logits_to_keep=1)

    @torch.inference_mode()
    def verify(
        self,
        tokens: Tensor,  # [N]
        positions: Tensor,  # [N]
        mask: Tensor | dict[str, Tensor] | None,  # [1, 1, N, L + N], or one for each layer type
        cache: KVCache,
    ) -> ForwardOutput:
        """Runs N tree nodes in one forward; the cache gains N rows."""
        return self._forward(tokens, positions, mask, cache, logits_to_keep=0)

    @torch.inference_mode()
    def hidden_rows(
        self,
        ids: Tensor,  # [N], the tokens behind those in the cache
        cache: KVCache,
    ) -> Tensor:  # [N, D]
        """What the LM head reads at N tokens of a text; the cache gains N rows.

        The LM head itself runs on the last row alone.
        """
        start = cache.get_seq_length()
        positions = torch.arange(start, start + ids.shape[0], device=ids.device)
        return self._forward(ids, positions, None, cache, 0, lm_head_rows=1).hidden

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        cache: KVCache,
        logits_to_keep: int,
        lm_head_rows: int | None = None,  # how many from the end get logits; None: all
    ) -> ForwardOutput:
        hidden: list[Tensor] = []

        def capture(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            hidden.append(arguments[0])  # [1, N, D]
            return None if lm_head_rows is None else (arguments[0][:, -lm_head_rows:],)

        handle = self.lm_head.register_forward_pre_hook(capture)
        try:
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


def _attention_layout(module: "PreTrainedModel", config: Any) -> AttentionLayout:
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
    if backend not in ATTENTION_BACKENDS:
        raise UnsupportedModelError(
            f"{name} uses the attention backend '{backend}', which does not take tree masks.\n"
            f"Load it with attn_implementation one of {', '.join(ATTENTION_BACKENDS)}."
        )
    return AttentionLayout(layer_types, getattr(config, "sliding_window", None))
