"""The JSON that `generate` prints: schema `medusa.generate/1`."""

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from medusa_cli import __version__
from medusa_cli.config import SamplingConfig
from medusa_cli.session import Medusa
from medusa_cli.text.events import Result, Step, step_milliseconds

SCHEMA = "medusa.generate/1"


def start_event(model: Medusa, sampling: SamplingConfig, prompt_tokens: int) -> dict[str, Any]:
    """The first line of `--format jsonl`."""
    return {
        "event": "start",
        **_identity(model, sampling),
        "usage": {"prompt_tokens": prompt_tokens},
    }


def step_event(step: Step) -> dict[str, Any]:
    """One forward's line of `--format jsonl`; `accept` is 0 for the prefill."""
    return {
        "event": "step",
        "token_ids": step.token_ids,
        "text": step.text,
        "accept": step.accept_length,
        "nodes": step.nodes,
        "ms": round(step.seconds * 1000, 3),
    }


def result_object(model: Medusa, result: Result, load_seconds: float) -> dict[str, Any]:
    """The object that `--format json` prints, and that ends `--format jsonl`."""
    return {
        **_identity(model, result.sampling),
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "steps": len(result.accept_lengths),
        },
        "accept": {
            "mean": round(result.mean_accept_length, 4),
            "lengths": result.accept_lengths,
            "histogram": result.histogram,
        },
        "nodes": {
            "mean": round(result.mean_nodes, 3),
            "per_step": result.step_nodes,
        },
        "timing": {
            "load_s": round(load_seconds, 4),
            "ttft_s": round(result.ttft_seconds, 4),
            "decode_s": round(result.decode_seconds, 4),
            "tokens_per_s": round(result.tokens_per_second, 3),
            "step_ms": step_milliseconds(result.step_seconds),
        },
        "memory": {"peak_bytes": _peak_bytes(model)},
        "warnings": result.warnings,
        "versions": {
            "medusa": __version__,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }


def to_json(data: dict[str, Any], *, indent: int | None = None) -> str:
    """One JSON text with a final newline."""
    return json.dumps(data, ensure_ascii=False, indent=indent) + "\n"


def _identity(model: Medusa, sampling: SamplingConfig) -> dict[str, Any]:
    tree = None
    if model.heads is not None:
        tree = {"name": model.tree.name, "nodes": model.tree.nodes, "depth": model.tree.depth}
    return {
        "schema": SCHEMA,
        "model": model.name,
        "heads": None if model.heads is None else model.heads.info.name,
        "mode": "plain" if model.heads is None else "medusa",
        "tree": tree,
        "sampling": {**asdict(sampling), "lossy": sampling.lossy and model.heads is not None},
    }


def _peak_bytes(model: Medusa) -> int:
    """Peak memory of the GPU that the model runs on, else of this process."""
    if model.base.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(model.base.device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes
