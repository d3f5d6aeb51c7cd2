"""What the roofline runs: the operators of each part of a decode step, at each size.

A case is a size with its counted work; its tensors are made only when it is measured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from medusa_cli.bench import counts
from medusa_cli.bench.counts import AttentionShape, Work
from medusa_cli.bench.roofline_report import Part
from medusa_cli.models.base import BaseModel, Engine
from medusa_cli.models.heads import Heads
from medusa_cli.models.tree_mask import AttentionLayout, path_table, tree_mask

if TYPE_CHECKING:
    from medusa_cli.models.cpu.engine import CpuEngine
    from medusa_cli.models.cpu.pool import Pool

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Noise:
    """Random tensors in one dtype on one device.

    Attributes:
        generator: makes them, on its device.
        buffer: [elements], noise to take views of instead of making more.
    """

    generator: torch.Generator
    buffer: Tensor

    def make(self, *shape: int) -> Tensor:
        """Normal noise in the buffer's dtype."""
        made = torch.randn(shape, generator=self.generator, device=self.buffer.device)
        return made.to(self.buffer.dtype)

    def slots(self, most: int, *shape: int) -> list[Tensor]:
        """Up to `most` disjoint tensors: as many as the buffer holds, at least one."""
        size = torch.Size(shape).numel()
        found = min(most, self.buffer.numel() // size)
        if found == 0:
            return [self.make(*shape)]
        return list(self.buffer[: found * size].view(found, *shape))


@dataclass(frozen=True, slots=True)
class Case:
    """One part at one size.

    Attributes:
        nodes, context: None where the part does not depend on them.
        work: what it computes and moves.
        memory: bytes that its tensors take.
        prepare: makes the tensors and gives what is timed.
    """

    part: Part
    nodes: int | None
    context: int | None
    batch: int
    work: Work
    memory: int
    prepare: Callable[[], Run]

    def __str__(self) -> str:
        sizes = {"nodes": self.nodes, "context": self.context, "batch": self.batch}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)


def linear_cases(
    noise: Noise, base: BaseModel, nodes: Sequence[int], batches: Sequence[int]
) -> Iterator[Case]:
    """Every linear layer of the base model once, one after the other."""
    layers = counts.linear_layers(base.module)
    widest = max(sum(counts.linear_sizes(layer)) for layer in layers)
    for batch, count in product(batches, nodes):
        rows = batch * count

        def prepare(rows: int = rows) -> Run:
            wanted = [(counts.linear_sizes(x)[0], _device(x, base.device)) for x in layers]
            inputs = {key: noise.make(rows, key[0]).to(key[1]) for key in set(wanted)}
            pairs = [(layer, inputs[key]) for layer, key in zip(layers, wanted, strict=True)]

            def run() -> None:
                for layer, x in pairs:
                    layer(x)

            return run

        memory = rows * widest * base.dtype.itemsize
        work = counts.linear_work(base, rows)
        yield Case(Part.LINEARS, count, None, batch, work, memory, prepare)


def attention_cases(
    noise: Noise,
    shape: AttentionShape,
    engine: Engine,
    nodes: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
) -> Iterator[Case]:
    """The attention of all layers as the engine runs it, each layer on its own cached rows."""
    itemsize = noise.buffer.element_size()
    make: Callable[..., Run] = _stock_attention
    if engine.paths:
        make = partial(_path_attention, cast("CpuEngine", engine).pool)
    for batch, context, count in product(batches, contexts, nodes):
        columns = context + count
        # Stock attention repeats keys and values for each query head, and may store the scores.
        repeated = 2 * shape.heads * columns * shape.head_dim
        memory = batch * (repeated + 2 * shape.heads * count * columns) * itemsize
        work = counts.attention_work(shape, context, count, batch, itemsize)
        prepare = partial(make, noise, shape, batch, context, count)
        yield Case(Part.ATTENTION, count, context, batch, work, memory, prepare)


def _stock_attention(
    noise: Noise, shape: AttentionShape, batch: int, context: int, count: int
) -> Run:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups = shape.heads // shape.kv_heads
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    query = noise.make(batch, shape.heads, count, shape.head_dim)
    rows = (2, batch, shape.kv_heads, context + count, shape.head_dim)  # keys and values
    slots = noise.slots(shape.layers, *rows)
    depths, paths = _chain(count, query.device)
    mask = tree_mask(depths, paths, context, AttentionLayout((), None), query.dtype)
    if mask is not None:
        mask = cast(Tensor, mask).repeat(batch, 1, 1, 1)

    def run() -> None:
        for layer in range(shape.layers):
            keys, values = slots[layer % len(slots)]
            sdpa_attention_forward(module, query, keys, values, mask)

    return run


def _path_attention(
    pool: "Pool", noise: Noise, shape: AttentionShape, batch: int, context: int, count: int
) -> Run:
    from medusa_cli.models.cpu.cache import PanelCacheLayer
    from medusa_cli.models.cpu.paths import PathAttention

    query = noise.make(1, shape.heads, count, shape.head_dim)
    new = noise.make(1, shape.kv_heads, context + count, shape.head_dim)
    stored = [PanelCacheLayer().update(new, new) for _ in range(shape.layers)]
    depths, paths = _chain(count, query.device)
    table = path_table(depths, paths, context) if count > 1 else None

    attention = PathAttention(pool)

    def run() -> None:
        for keys, values in stored:
            for _ in range(batch):
                attention(None, query, keys, values, table)

    return run


def _chain(count: int, device: torch.device) -> tuple[Tensor, Tensor]:  # [N], [N, N]
    """Depths and paths of a tree that is one path: its shape does not matter for the cost."""
    steps = torch.arange(count, device=device)
    return steps, torch.minimum(steps[:, None], steps[None, :])


def product_cases(
    noise: Noise, shape: AttentionShape, context: int, nodes: Sequence[int], batches: Sequence[int]
) -> Iterator[Case]:
    """QK^T and PV of one layer as batched matrix products; query heads share their KV head's."""
    itemsize = noise.buffer.element_size()
    for batch, count in product(batches, nodes):
        columns = context + count

        def prepare(batch: int = batch, count: int = count, columns: int = columns) -> Run:
            pairs = batch * shape.kv_heads
            together = shape.heads // shape.kv_heads * count
            query = noise.make(pairs, together, shape.head_dim)
            keys, values = noise.slots(1, 2, pairs, columns, shape.head_dim)[0]
            return lambda: (query @ keys.transpose(1, 2)) @ values

        work = counts.product_work(shape, context, count, batch, itemsize)
        yield Case(Part.PRODUCT, count, context, batch, work, work.bytes, prepare)


def head_cases(
    noise: Noise, base: BaseModel, heads: Heads, used: int, batches: Sequence[int]
) -> Iterator[Case]:
    """One draft of the first `used` heads."""
    device = _device(base.lm_head, base.device)
    for batch in batches:

        def prepare(batch: int = batch) -> Run:
            rows = () if batch == 1 else (batch,)
            hidden = noise.make(*rows, base.hidden_size).to(device)
            pending = torch.zeros(rows, dtype=torch.long, device=base.device)
            return lambda: heads.logits(hidden, pending, used)

        memory = used * batch * heads.info.vocabulary * base.dtype.itemsize
        work = counts.heads_work(base, heads, used, batch)
        yield Case(Part.HEADS, None, None, batch, work, memory, prepare)


def _device(layer: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a layer wants its input; weights on `meta` are brought in when it is called."""
    device = next(iter(layer.state_dict().values())).device
    return otherwise if device.type == "meta" else device
