"""Measures the roofline: what this machine can do, and how near the parts of a decode step come.

The roof is the machine's own: bandwidth of a streaming read, rate of a matrix product. Each part
runs on the model's own operators without the rest of the step, and cold: before each run a buffer
larger than the caches is read, as the other parts of a step would do. This module does not decode
and knows no text.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from medusa_cli.bench import counts
from medusa_cli.bench.honesty import BUSY_SHARE
from medusa_cli.bench.machine import OtherLoad
from medusa_cli.bench.roofline_cases import (
    Case,
    Noise,
    Run,
    attention_cases,
    head_cases,
    linear_cases,
    product_cases,
)
from medusa_cli.bench.roofline_report import FREE_COST, FreeNodes, Part, Point, Roof, Roofline
from medusa_cli.models.base import BaseModel
from medusa_cli.models.hardware import device_name
from medusa_cli.models.storage import human_bytes
from medusa_cli.session import Medusa

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (256, 1024)
BATCHES = (1, 4)
# The grid of the paper's figure. Source: Cai et al. 2024, arXiv 2401.10774.
PRODUCT_CONTEXT = 1024
PRODUCT_NODES = (1, 2, 4, 8, 16, 32, 64, 128)
PRODUCT_BATCHES = (1, 4, 16, 64)

BLOCK = 1 << 16  # random numbers that fill the buffer over and over
WIDTH = 1 << 14  # of the matrix that the matrix-vector product reads
SLOW_SECONDS = 1.0  # a run from here on is not repeated
ENOUGH_SECONDS = 0.2  # a square product that takes longer has shown the matrix rate


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to spend on measuring.

    Attributes:
        buffer_bytes: read for the bandwidth and before each run; several last-level caches.
        memory: bytes that the tensors of one point may take.
        seconds: a point that would take longer under the roof is left out.
        repeats: timed runs after the warm-up.
        matrix_sizes: of the square products tried for the matrix rate, growing.
    """

    buffer_bytes: int
    memory: int
    seconds: float = 10.0
    repeats: int = 5
    matrix_sizes: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)


CPU_EFFORT = Effort(buffer_bytes=1 << 29, memory=1 << 30)
GPU_EFFORT = Effort(buffer_bytes=1 << 31, memory=1 << 32)


@dataclass(frozen=True, slots=True)
class _Stopwatch:
    """Times runs that find the caches cold."""

    clock: Callable[[], float]
    devices: tuple[torch.device, ...]  # to wait for
    buffer: Tensor
    repeats: int

    def seconds(self, run: Run) -> list[float]:
        """The timed runs after one warm-up; the warm-up alone when it is slow."""
        first = self._once(run)
        return [first] if first > SLOW_SECONDS else [self._once(run) for _ in range(self.repeats)]

    def _once(self, run: Run) -> float:
        self.buffer.view(torch.int32).amax()
        self._wait()
        start = self.clock()
        run()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        for device in self.devices:
            torch.accelerator.synchronize(device)


@torch.inference_mode()
def measure_roofline(
    model: Medusa,
    nodes: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    report: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
    effort: Effort | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Roofline:
    """Measures the roof, then every part at every size.

    Args:
        model: without heads, that part is left out.
        nodes: node counts; 1 is always among them.
        contexts: cached rows; those beyond the model's context are left out.
        batches: numbers of sequences.
        report: hears what comes next.
        clock: gives seconds.
        effort: by default one that suits the device.
        should_stop: asked before each size; True leaves out what is not measured yet.
    """
    base, heads, load = model.base, model.heads, OtherLoad()
    on_cpu = base.device.type == "cpu"
    effort = effort or (CPU_EFFORT if on_cpu else GPU_EFFORT)
    fitting = [c for c in contexts if base.context_length is None or c <= base.context_length]
    warnings = list(counts.uncounted_weights(base))
    warnings += [f"context {c} is beyond the model's" for c in contexts if c not in fitting]
    if base.module.config._attn_implementation != "sdpa":
        warnings.append("attention is measured with sdpa, which this model does not run")
    if not on_cpu:
        warnings.append("times include kernel launches, which weigh on small sizes")

    report("memory bandwidth and matrix rate")
    noise = _noise(base, effort)
    devices = {parameter.device for parameter in base.module.parameters()}
    accelerators = tuple(d for d in devices if d.type not in ("cpu", "meta"))
    stopwatch = _Stopwatch(clock, accelerators, noise.buffer, effort.repeats)
    roof = _roof(stopwatch, noise, effort)

    shape = counts.attention_shape(base)
    nodes = sorted({1, *nodes})
    stages = [
        list(linear_cases(noise, base, nodes, batches)),
        list(attention_cases(noise, shape, model.base.engine, nodes, fitting, batches)),
        list(product_cases(noise, shape, PRODUCT_CONTEXT, PRODUCT_NODES, PRODUCT_BATCHES)),
    ]
    if heads is not None:
        used = model.tree.depth or heads.info.num_heads
        stages.insert(2, list(head_cases(noise, base, heads, used, batches)))
    timed: list[tuple[Case, float]] = []
    for cases in filter(None, stages):
        report(f"{cases[0].part}: {len(cases)} sizes")
        skipped = [case for case in cases if _too_much(case, roof, effort)]
        warnings += _skip_warning(cases, skipped, effort)
        kept = [case for case in cases if case not in skipped]
        for case in kept:
            if should_stop():
                break
            timed.append((case, median(stopwatch.seconds(case.prepare()))))
    complete = not should_stop()
    if not complete:
        warnings.insert(0, "partial: interrupted before every size was measured")

    report("memory bandwidth and matrix rate, again")
    again = _roof(stopwatch, noise, effort)  # one of the two may have met a busy moment
    roof = Roof(max(roof.bandwidth, again.bandwidth), max(roof.flops, again.flops))
    points = [_point(case, seconds, roof) for case, seconds in timed]
    if load.share() >= BUSY_SHARE:
        warnings.append(f"other processes used {load.share():.0%} of this machine meanwhile")
    return Roofline(
        device=device_name(base.device),
        dtype=base.precision,
        roof=roof,
        points=tuple(point for point in points if point.part is not Part.PRODUCT),
        attention_product=tuple(point for point in points if point.part is Part.PRODUCT),
        free=tuple(_free(base, roof, points, batch) for batch in batches),
        warnings=tuple(warnings),
        complete=complete,
    )


def _noise(base: BaseModel, effort: Effort) -> Noise:
    generator = torch.Generator(base.device).manual_seed(0)
    block = torch.randn(BLOCK, generator=generator, device=base.device).to(base.dtype)
    return Noise(generator, block.repeat(effort.buffer_bytes // (BLOCK * block.element_size())))


def _roof(stopwatch: _Stopwatch, noise: Noise, effort: Effort) -> Roof:
    """The fastest streaming read, and the fastest square product in the model's dtype.

    Which reader streams best depends on dtype and device: each is tried.
    """
    buffer = noise.buffer
    matrix = buffer.view(-1, WIDTH)
    readers: tuple[Run, ...] = (
        lambda: buffer.view(torch.int32).amax(),
        lambda: buffer.view(torch.int64).sum(),
        lambda: torch.mv(matrix, matrix[0]),
    )
    read = min(second for reader in readers for second in stopwatch.seconds(reader))
    rate = 0.0
    for size in effort.matrix_sizes:
        fastest = min(stopwatch.seconds(_square(noise, size)))
        rate = max(rate, 2 * size**3 / fastest)
        if fastest > ENOUGH_SECONDS:
            break
    return Roof(buffer.numel() * buffer.element_size() / read, rate)


def _square(noise: Noise, size: int) -> Run:
    left, right = noise.make(size, size), noise.make(size, size)
    return lambda: left @ right


def _too_much(case: Case, roof: Roof, effort: Effort) -> bool:
    expected = max(case.work.flops / roof.flops, case.work.bytes / roof.bandwidth)
    return case.memory > effort.memory or expected > effort.seconds


def _skip_warning(cases: Sequence[Case], skipped: Sequence[Case], effort: Effort) -> list[str]:
    if not skipped:
        return []
    return [
        f"{cases[0].part}: {len(skipped)} of {len(cases)} sizes need more than "
        f"{human_bytes(effort.memory)} or {effort.seconds:g} s and are left out "
        f"(the first: {skipped[0]})"
    ]


def _point(case: Case, seconds: float, roof: Roof) -> Point:
    return Point(case.part, case.nodes, case.context, case.batch, case.work, seconds, roof)


def _free(base: BaseModel, roof: Roof, points: Sequence[Point], batch: int) -> FreeNodes:
    """Solves intensity = ridge: FLOPs grow with the rows, of the bytes only the activations'."""
    one, two = counts.linear_work(base, batch), counts.linear_work(base, 2 * batch)
    activations = two.bytes - one.bytes
    surplus = one.flops - roof.ridge * activations  # per node, above what its bytes allow
    counted = int(roof.ridge * (one.bytes - activations) / surplus) if surplus > 0 else None
    found = [p for p in points if p.part is Part.LINEARS and p.batch == batch]
    limit = FREE_COST * next((p.seconds for p in found if p.nodes == 1), 0.0)
    measured = max((p.nodes for p in found if p.nodes and p.seconds <= limit), default=None)
    return FreeNodes(batch, counted, measured)
