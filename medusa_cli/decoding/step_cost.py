"""What a decode step costs on this machine, against the number of tree nodes.

The table is measured once for a model, device and precision, kept in the cache folder, and read by
whatever chooses a tree size.
"""

import hashlib
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from medusa_cli.config import SamplingConfig
from medusa_cli.decoding.decode import Drafter, draft, verify
from medusa_cli.decoding.sampling import Sampler
from medusa_cli.decoding.tree import Tree
from medusa_cli.decoding.tree_buffers import tree_buffers
from medusa_cli.errors import CheckpointError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.hardware import device_name
from medusa_cli.models.storage import cache_folder, write_atomic

FORMAT = "medusa-step-cost/1"
CONTEXT = 256  # valid KV rows at which steps are timed
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a whole decode step (draft, verify, accept, compact) by number of nodes.

    Attributes:
        model, device, dtype: what they were measured on.
        threads: that torch used.
        context: valid KV rows meanwhile.
        seconds: by number of nodes, the root included.
    """

    model: str
    device: str
    dtype: str
    threads: int
    context: int
    seconds: dict[int, float]

    def at(self, nodes: int) -> float:
        """Seconds of a step over `nodes`, interpolated between measured counts.

        Beyond the measured counts the nearest one's cost holds, in proportion to the nodes above.
        """
        counts = sorted(self.seconds)
        i = bisect_left(counts, nodes)
        if i == len(counts):
            return self.seconds[counts[-1]] * nodes / counts[-1]
        if counts[i] == nodes or i == 0:
            return self.seconds[counts[i]]
        low, high = counts[i - 1], counts[i]
        share = (nodes - low) / (high - low)
        return self.seconds[low] * (1 - share) + self.seconds[high] * share


def measure_step_seconds(
    base: BaseModel,
    drafter: Drafter | None,
    trees: Mapping[str, Tree],
    report: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.perf_counter,
    should_stop: Callable[[], bool] = lambda: False,
    rounds: int = ROUNDS,
    context: int = CONTEXT,
) -> dict[str, float]:
    """Median seconds of a greedy step with each tree, on `context` rows of made-up text.

    Rounds go over all trees forwards and backwards in turn, so that drift hits all alike; the
    first one is not counted. Every step reads its tokens back to the host, which waits for the
    device. When `should_stop` says so after the first counted round, the rounds made so far count.
    """
    sampler = Sampler(SamplingConfig(seed=0), base.device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(base.vocab_size, (context,), generator=generator).to(base.device)
    cache = KVCache()
    output = base.prefill(ids, cache)
    cache.append(ids.tolist())
    hidden, pending = output.hidden[0], output.logits[0].argmax()
    buffers = {name: tree_buffers(tree, base.device) for name, tree in trees.items()}
    taken: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(rounds + 1):
        if turn > 1 and should_stop():
            break
        report(f"timing steps, round {turn} of {rounds}" if turn else "warming up")
        order = list(buffers) if turn % 2 else list(buffers)[::-1]
        for name in order:
            started = clock()
            tokens = draft(drafter, hidden, pending, buffers[name])
            verify(base, sampler, tokens, buffers[name], cache)
            if turn:
                taken[name].append(clock() - started)
            cache.keep(context)
    return {name: median(seconds) for name, seconds in taken.items()}


def costs_of(base: BaseModel, seconds: Mapping[int, float]) -> StepCosts:
    """Measured seconds with what they were measured on."""
    return StepCosts(
        model=Path(base.module.name_or_path).name,
        device=f"{base.device.type} {device_name(base.device)}",
        dtype=str(base.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        context=CONTEXT,
        seconds=dict(seconds),
    )


def save_costs(costs: StepCosts) -> Path:
    """Keeps a table where `load_costs` finds it.

    Raises:
        StorageError: the cache folder cannot be written.
    """
    path = _file(costs)
    data = {"format": FORMAT, **asdict(costs)}
    write_atomic(path, json.dumps(data, indent=1) + "\n", parents=True)
    return path


def load_costs(base: BaseModel) -> StepCosts | None:
    """The table that was measured for this model, device and precision, or None.

    Raises:
        CheckpointError: it is damaged.
    """
    path = _file(costs_of(base, {}))
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT}")
        seconds = {int(nodes): float(value) for nodes, value in data.pop("seconds").items()}
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("it holds no costs")
        return StepCosts(**data, seconds=seconds)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): remove it, or measure again with "
            "`medusa bench --sweep-nodes`"
        ) from None


def _file(costs: StepCosts) -> Path:
    key = f"{costs.model} {costs.device} {costs.dtype} {costs.threads} {costs.context}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / "step-costs" / f"{costs.model}-{name}.json"
