"""What the hardware calls itself."""

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The name of a GPU, else of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


def processor_name() -> str:
    """The CPU's name as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
