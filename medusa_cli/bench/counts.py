"""Work of a decode step, counted: FLOPs, and bytes that must pass between memory and processor.

Counts follow the roofline convention: a multiply and an add are two FLOPs, each operand is read
once and each result written once, whatever caches and kernels make of it. This module counts what
it is shown and measures nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from medusa_cli.models.base import BaseModel
from medusa_cli.models.cpu.modules import PackedLinear
from medusa_cli.models.heads import Head, Heads
from medusa_cli.models.storage import human_bytes

UNCOUNTED_SHARE = 0.01  # of all parameters: from here on missing weights are worth a warning


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation computes and moves."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Operational intensity, FLOP/byte; 0 for no work."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "Work":
        return Work(self.flops * times, self.bytes * times)


NO_WORK = Work(0, 0)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model's attention: layers, query heads, heads of the KV cache, width of a head."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def linear_layers(module: nn.Module) -> list[nn.Module]:
    """The linear layers of a module, one entry for each place that uses one.

    The LM head is among them, also where it shares its weight with the embedding; an embedding
    lookup is not a product and is not. Every linear layer counts as used: of experts that are
    linear layers of their own, a step uses fewer.
    """
    found = module.named_modules(remove_duplicate=False)
    return [layer for _, layer in found if isinstance(layer, nn.Linear | Conv1D | PackedLinear)]


def linear_sizes(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    linear = cast(nn.Linear | PackedLinear, layer)
    return linear.in_features, linear.out_features


def uncounted_weights(base: BaseModel) -> tuple[str, ...]:
    """Warnings about weights that `linear_work` misses, such as experts fused to 3-D tensors."""
    known = (nn.Linear, nn.Embedding, Conv1D)
    missed = [
        (f"{name}.{key}", parameter)
        for name, module in base.module.named_modules()
        if not isinstance(module, known)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1
    ]
    size = sum(p.numel() * p.element_size() for _, p in missed)
    if size < UNCOUNTED_SHARE * base.parameter_bytes():
        return ()
    name, largest = max(missed, key=lambda item: item[1].numel())
    return (
        f"{human_bytes(size)} of weights are no linear layers and are left out of the counts, "
        f"such as {name} {list(largest.shape)}",
    )


def linear_work(base: BaseModel, rows: int) -> Work:
    """All linear layers of the base model over `rows` = nodes x batch rows, LM head included.

    Weights and biases are read once. FLOPs of biases are not counted.
    """
    itemsize = base.dtype.itemsize
    return _total(_linear(layer, rows, itemsize) for layer in linear_layers(base.module))


def attention_shape(base: BaseModel) -> AttentionShape:
    """The attention sizes that the model's config names."""
    config = base.module.config.get_text_config()
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or base.hidden_size // heads
    return AttentionShape(
        int(config.num_hidden_layers), heads, _kv_heads(config, heads), int(head_dim)
    )


def attention_work(
    shape: AttentionShape, context: int, nodes: int, batch: int, itemsize: int
) -> Work:
    """QK^T and PV of all layers, fused: scores never leave the processor.

    Each of N nodes sees all L + N columns: a mask hides some, stock kernels compute them anyway,
    in sliding-window layers too. Keys and values are read once per KV head, queries and the mask
    read and the output written once; a lone root has no mask.
    """
    columns = context + nodes
    mask = nodes * columns if nodes > 1 else 0
    moved = _operands(shape, columns, nodes) + mask
    return Work(_attention_flops(shape, columns, nodes), itemsize * moved) * batch * shape.layers


def product_work(
    shape: AttentionShape, context: int, nodes: int, batch: int, itemsize: int
) -> Work:
    """QK^T and PV of one layer as two matrix products: scores are written and read back.

    Source: Cai et al. 2024, arXiv 2401.10774, the roofline analysis of its appendix.
    """
    columns = context + nodes
    scores = 2 * shape.heads * nodes * columns
    moved = _operands(shape, columns, nodes) + scores
    return Work(_attention_flops(shape, columns, nodes), itemsize * moved) * batch


def heads_work(base: BaseModel, heads: Heads, used: int, batch: int) -> Work:
    """The first `used` heads drafting from one hidden row per sequence.

    A shared LM head is read once for all heads; with a draft vocabulary it has V' rows.
    """
    itemsize = base.dtype.itemsize
    modules = [cast(Head, heads.heads[k]) for k in range(used)]
    work = _total(_linear(x, batch, itemsize) for head in modules for x in linear_layers(head))
    if not modules or modules[0].lm_head is not None:
        return work
    width, vocabulary = base.hidden_size, heads.info.vocabulary
    weight_bytes = _weight_bytes(base.lm_head) * vocabulary // base.vocab_size
    return work + _product(width, vocabulary, weight_bytes, used * batch, itemsize)


def _linear(layer: nn.Module, rows: int, itemsize: int) -> Work:
    return _product(*linear_sizes(layer), _weight_bytes(layer), rows, itemsize)


def _weight_bytes(layer: nn.Module) -> int:
    tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return sum(t.numel() * t.element_size() for t in tensors)


def _product(inputs: int, outputs: int, weight_bytes: int, rows: int, itemsize: int) -> Work:
    return Work(
        2 * rows * inputs * outputs,
        weight_bytes + rows * (inputs + outputs) * itemsize,
    )


def _attention_flops(shape: AttentionShape, columns: int, nodes: int) -> int:
    return 4 * shape.heads * nodes * columns * shape.head_dim


def _operands(shape: AttentionShape, columns: int, nodes: int) -> int:
    """Elements of keys, values, queries and output for one sequence in one layer."""
    return 2 * shape.head_dim * (shape.kv_heads * columns + shape.heads * nodes)


def _kv_heads(config: Any, heads: int) -> int:
    named = getattr(config, "num_key_value_heads", None)
    if named is None and getattr(config, "multi_query", False):  # Falcon's way to say 1
        new = getattr(config, "new_decoder_architecture", False)
        named = getattr(config, "num_kv_heads", None) if new else 1
    return int(named or heads)


def _total(parts: Iterable[Work]) -> Work:
    return sum(parts, NO_WORK)
