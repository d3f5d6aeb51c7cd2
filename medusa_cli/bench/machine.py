"""What a measurement ran on: the machine and its load, memory in use, hashes of what was loaded."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import psutil
import torch

from medusa_cli import __version__
from medusa_cli.decoding.adaptive import AnyTree, AutoTree
from medusa_cli.models.base import BaseModel
from medusa_cli.models.hardware import device_name, processor_name

_PACKAGES = ("torch", "transformers", "accelerate", "llama-cpp-python")


def environment(base: BaseModel) -> dict[str, Any]:
    """Versions, hardware and settings that speed depends on."""
    versions = {"medusa": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": str(base.device),
        "device_name": device_name(base.device),
        "dtype": base.precision,
        "engine": base.engine.name,
        "attention": base.module.config._attn_implementation,
        "parameter_bytes": base.parameter_bytes(),
    }


def tree_sha256(tree: AnyTree) -> str:
    """SHA-256 of a tree's choices, whatever its name; of the adaptive tree's calibration."""
    content = asdict(tree.calibration) if isinstance(tree, AutoTree) else tree.choices
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class CpuMemory:
    """Resident memory of this process, looked at when told to."""

    def __init__(self) -> None:
        self._process, self._peak = psutil.Process(), 0

    def reset(self) -> None:
        """A new run begins."""
        self._peak = 0

    def sample(self) -> None:
        """A good moment to look."""
        self._peak = max(self._peak, self._process.memory_info().rss)

    def peak(self) -> int:
        """Bytes."""
        return self._peak


class CudaMemory:
    """Memory that torch has allocated on all GPUs; torch itself notes the peak."""

    def reset(self) -> None:
        """A new run begins."""
        for device in self._devices():
            torch.cuda.reset_peak_memory_stats(device)

    def sample(self) -> None:
        """Nothing to do: torch sees every allocation."""

    def peak(self) -> int:
        """Bytes."""
        return sum(torch.cuda.max_memory_allocated(device) for device in self._devices())

    @staticmethod
    def _devices() -> Iterable[int]:
        return range(torch.cuda.device_count())


def memory_meter(device: torch.device) -> CpuMemory | CudaMemory:
    """The meter that fits a device."""
    return CudaMemory() if device.type == "cuda" else CpuMemory()


class OtherLoad:
    """How much of the machine other processes use, between creation and the call of `share`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._started, self._busy, self._own = time.monotonic(), _busy(), self._own_seconds()

    def share(self) -> float:
        """Share of all cores' time that went to other processes, 0 to 1."""
        seconds = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        others = (_busy() - self._busy) - (self._own_seconds() - self._own)
        return min(1.0, max(0.0, others / seconds)) if seconds > 0 else 0.0

    def _own_seconds(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def _busy() -> float:
    """Seconds that all cores together have worked."""
    times = psutil.cpu_times()
    resting = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as user too
    spent = cast(dict[str, float], times._asdict())
    return sum(value for name, value in spent.items() if name not in resting)
