"""Reading tensors and JSON from files that somebody else wrote, without running their code."""

import hashlib
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import CheckpointError


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a `.safetensors` or torch file whose names start with `prefix`.

    They stay mapped to the file until they are copied, so reading allocates next to nothing.

    Raises:
        CheckpointError: no such file, damaged, or holding other objects than tensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt", device="cpu") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  # no mapping
                return {name: file.get_tensor(name) for name in names}
        # Only the zip format, torch's own since 1.6, can be mapped.
        data = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: fetch the checkpoint again") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors; medusa runs no code from checkpoints.\n"
            "Fetch it again, or ask for a .safetensors file."
        ) from None
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from None
    if not isinstance(data, Mapping) or not all(isinstance(v, Tensor) for v in data.values()):
        raise CheckpointError(f"{path} is not a mapping from names to tensors")
    return {str(name): tensor for name, tensor in data.items() if str(name).startswith(prefix)}


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, kinds, shapes and bytes, whatever the file or device they lie on."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it cannot be read, or is not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return data


def sharded_files(folder: Path, prefix: str) -> list[Path]:
    """The weight files of a model directory, of which at least one tensor starts with `prefix`.

    Raises:
        CheckpointError: an index or a weight file is damaged.
    """
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} has no weight_map: fetch the model again")
            names = {str(shard) for name, shard in weight_map.items() if name.startswith(prefix)}
            return [folder / name for name in sorted(names)]
        if (folder / stem).is_file():
            return [folder / stem] if read_tensors(folder / stem, prefix) else []
    return []
