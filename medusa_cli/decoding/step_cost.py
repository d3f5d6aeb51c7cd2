"""What decode steps cost on this machine: kept tables, read by whatever chooses a tree.

A table belongs to a model with its heads, a device, a precision, an engine and a number of threads.
It lies in the cache folder. Measuring is `step_timing`'s job.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from medusa_cli.errors import CheckpointError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.hardware import device_name
from medusa_cli.models.heads import HeadsInfo
from medusa_cli.models.storage import cache_folder, write_atomic

FORMAT = "medusa-step-cost/3"


@dataclass(frozen=True, slots=True)
class CostKey:
    """What a table was measured on.

    Attributes:
        model, heads: names.
        device, dtype, engine: that the model runs on, in and by.
        threads: that torch uses.
    """

    model: str
    heads: str
    device: str
    dtype: str
    engine: str
    threads: int


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a decode step, drafting apart from the rest.

    Attributes:
        key: what it was measured on.
        verify: seconds to verify, accept and compact, by number of nodes, the root included.
        draft: seconds of running the first 1, 2, ... heads.
        context: rows of the KV cache that `verify` was measured on.
        growth: seconds that a further row of the KV cache adds, by number of nodes.
    """

    key: CostKey
    verify: dict[int, float]
    draft: tuple[float, ...]
    context: int = 0
    growth: dict[int, float] = field(default_factory=dict)

    def at(self, nodes: int, rows: int = 0) -> float:
        """Seconds to verify `nodes` on `rows` of context, between what was measured.

        Beyond the measured counts the nearest one's cost holds, in proportion to the nodes above.
        """
        further = max(0, rows - self.context)
        growth = _between(self.growth, nodes) if self.growth else 0.0
        return _between(self.verify, nodes) + further * growth

    def up_to(self, nodes: int, rows: int = 0) -> list[float]:
        """Seconds to verify 0, 1, ..., `nodes` nodes on `rows` of context, which never fall.

        What took longer than more nodes did was disturbed.
        """
        found = [self.at(n, rows) for n in range(1, nodes + 1)]
        for n in reversed(range(len(found) - 1)):
            found[n] = min(found[n], found[n + 1])
        return [0.0, *found]

    def drafting(self, heads: int) -> float:
        """Seconds of running the first `heads` heads."""
        return self.draft[min(heads, len(self.draft)) - 1] if heads > 0 and self.draft else 0.0


def cost_key(base: BaseModel, heads: HeadsInfo) -> CostKey:
    """What costs on this machine would belong to."""
    return CostKey(
        model=Path(base.module.name_or_path).name,
        heads=Path(heads.name).name,
        device=f"{base.device.type} {device_name(base.device)}",
        dtype=str(base.dtype).removeprefix("torch."),
        engine=base.engine.name,
        threads=torch.get_num_threads(),
    )


def save_costs(costs: StepCosts) -> Path:
    """Keeps a table where `load_costs` finds it.

    Raises:
        StorageError: the cache folder cannot be written.
    """
    path = _file(costs.key)
    data = {"format": FORMAT, **asdict(costs)}
    write_atomic(path, json.dumps(data, indent=1) + "\n", parents=True)
    return path


def load_costs(key: CostKey) -> StepCosts | None:
    """The table that was measured for a key, or None.

    Raises:
        CheckpointError: it is damaged.
    """
    path = _file(key)
    if not path.is_file():
        return None
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")), key)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): remove it, or measure again with "
            "`medusa bench --sweep-nodes`"
        ) from None


def _between(measured: Mapping[int, float], nodes: int) -> float:
    counts = sorted(measured)
    i = bisect_left(counts, nodes)
    if i == len(counts):
        return measured[counts[-1]] * nodes / counts[-1]
    if counts[i] == nodes or i == 0:
        return measured[counts[i]]
    low, high = counts[i - 1], counts[i]
    share = (nodes - low) / (high - low)
    return measured[low] * (1 - share) + measured[high] * share


def _parsed(data: Any, key: CostKey) -> StepCosts:
    if data["format"] != FORMAT:
        raise ValueError(f"it is not of the format {FORMAT}")
    verify, growth = (
        {int(nodes): float(value) for nodes, value in data[name].items()}
        for name in ("verify", "growth")
    )
    context = int(data["context"])
    draft = tuple(float(value) for value in data["draft"])
    if not verify or min(verify) < 1 or min(*verify.values(), *draft, 1.0) <= 0:
        raise ValueError("it holds no costs")
    if min(0, context, *growth, *growth.values()) < 0:
        raise ValueError("costs fall as the context grows")
    return StepCosts(key, verify, draft, context, growth)


def _file(key: CostKey) -> Path:
    name = hashlib.sha256(json.dumps(asdict(key)).encode()).hexdigest()[:16]
    return cache_folder() / "step-costs" / f"{key.model}-{name}.json"
