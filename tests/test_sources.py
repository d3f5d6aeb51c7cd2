"""Finding models and heads: aliases, directories, hub repositories, and what is refused."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from safetensors.torch import save_file

from conftest import head_tensors, tiny_module
from medusa_cli.decoding.tree import shipped_trees
from medusa_cli.errors import ModelNotFoundError, StorageError
from medusa_cli.models import hub, registry
from medusa_cli.models.progress import Stage
from medusa_cli.models.sources import Finder
from medusa_cli.text.prompts import shipped_template


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    tiny_module().save_pretrained(folder)
    return folder


@pytest.fixture
def heads_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "heads"
    folder.mkdir()
    save_file(head_tensors(2), folder / "medusa_lm_head.safetensors")
    return folder


def test_registry_names_only_what_is_shipped() -> None:
    trees = shipped_trees()
    for alias, entry in registry.entries().items():
        assert entry.tree in trees, alias
        assert entry.small_tree in trees, alias
        assert entry.embedded or entry.model, alias
        if entry.template is not None:
            assert shipped_template(entry.template)
        if entry.heads is not None and (folder := registry.builtin_heads(entry.heads)):
            assert (folder / "medusa_heads.safetensors").is_file()
    assert registry.DEFAULT_MODEL in registry.entries()


def test_default_cpu_tree_has_the_greatest_products_of_rank_accuracies() -> None:
    entry = registry.entries()[registry.DEFAULT_MODEL]
    folder = registry.builtin_heads(entry.heads or "")
    assert folder is not None
    accuracy = json.loads((folder / "config.json").read_text())["accuracy"]["rank_accuracy"]
    products = {(): 1.0}
    for head in range(2):
        for path in [p for p in products if len(p) == head]:
            products |= {(*path, r): products[path] * accuracy[head][r] for r in range(10)}
    best = sorted(products, key=lambda path: -products[path])[1:8]
    choices = json.loads(shipped_trees()[entry.small_tree].read_text())["choices"]
    assert sorted(map(tuple, choices)) == sorted(best)


def test_local_directories_and_files(base_folder: Path, heads_folder: Path) -> None:
    finder = Finder(offline=True)
    for heads in (heads_folder, heads_folder / "medusa_lm_head.safetensors"):
        source = finder.find(str(base_folder), str(heads))
        assert source.folder == base_folder
        assert source.heads is not None
        assert source.heads.tensors == (heads_folder / "medusa_lm_head.safetensors",)


def test_a_base_model_without_heads_says_what_to_do(base_folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no Medusa heads found .* --heads.*--plain"):
        Finder(offline=True).find(str(base_folder))
    source = Finder(offline=True).find(str(base_folder), plain=True)
    assert source.heads is None


def test_a_heads_folder_stands_for_its_base_model(base_folder: Path, heads_folder: Path) -> None:
    config = {"base_model_name_or_path": str(base_folder), "medusa_num_heads": 2}
    (heads_folder / "config.json").write_text(json.dumps(config))
    source = Finder(offline=True).find(str(heads_folder))
    assert source.folder == base_folder
    assert source.heads is not None
    config["base_model_name_or_path"] = "N/A"
    (heads_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match="--model BASE --heads"):
        Finder(offline=True).find(str(heads_folder))


@pytest.mark.parametrize("name", ["nope", "./nope/x", "/nope", "a/b/c", "smollm2-135", ""])
def test_unknown_models_are_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        Finder(offline=True).find(name)


def test_a_near_miss_is_hinted_at() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'vicuna-7b'"):
        Finder(offline=True).find("vicuna7b")


@pytest.mark.parametrize("heads", ["./nope", "nope"])
def test_unknown_heads_are_refused(base_folder: Path, heads: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no heads"):
        Finder(offline=True).find(str(base_folder), heads)


def test_a_folder_without_heads_is_refused(base_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no Medusa heads"):
        Finder(offline=True).find(str(base_folder), str(tmp_path))


def test_offline_and_not_cached_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="not whole in the hub's cache"):
        Finder(offline=True).find("lmsys/vicuna-7b-v1.3")


class FakeHub:
    """Stands for the hub: which repositories there are, and what was asked of it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, sizes: dict[str, int]
    ) -> None:
        self.downloads: list[tuple[str, list[str]]] = []
        self.repositories = {"owner/there"}
        self.cached: Path | None = None
        fake = self

        def snapshot_download(
            repository: str,
            *,
            revision: str | None = None,
            local_files_only: bool = False,
            allow_patterns: Any = None,
        ) -> str:
            del revision
            if local_files_only and fake.cached is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
            if local_files_only:
                return str(fake.cached)
            fake.downloads.append((repository, allow_patterns))
            return str(folder)

        class Api:
            def model_info(self, repository: str, **_options: Any) -> Any:
                if repository not in fake.repositories:
                    raise missing_repository()
                files = [SimpleNamespace(rfilename=n, size=s) for n, s in sizes.items()]
                return SimpleNamespace(siblings=files)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def missing_repository() -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=404, text="")
    return huggingface_hub.errors.RepositoryNotFoundError("404", response=response)


def test_safetensors_are_preferred_and_large_downloads_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"a.safetensors": 600_000_000, "a.bin": 600_000_000, "config.json": 10}
    fake = FakeHub(monkeypatch, tmp_path, sizes)
    heard: list[Stage] = []
    assert hub.fetch("owner/there", None, heard.append, offline=False) == tmp_path
    ((_, patterns),) = fake.downloads
    assert "a.safetensors" in patterns
    assert "a.bin" not in patterns
    assert "600 MB" in heard[0].text
    assert "free" in heard[0].text


def test_what_an_interrupted_download_left_is_completed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeHub(monkeypatch, tmp_path / "complete", {"a.safetensors": 10})
    fake.cached = tmp_path / "cached"
    fake.cached.mkdir()

    def fetched(*, offline: bool = False) -> Path:
        return hub.fetch("owner/there", None, lambda _stage: None, offline=offline)

    (fake.cached / "config.json").write_text("{}")
    assert fetched() == tmp_path / "complete"
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (fake.cached / "model.safetensors.index.json").write_text(json.dumps(index))
    (fake.cached / "one.safetensors").write_text("")
    assert fetched() == tmp_path / "complete"
    with pytest.raises(ModelNotFoundError, match="not whole"):
        fetched(offline=True)
    (fake.cached / "two.safetensors").write_text("")
    assert fetched() == fetched(offline=True) == fake.cached


def test_heads_are_fetched_beside_weights_of_another_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeHub(monkeypatch, tmp_path, {"model.safetensors": 1, "medusa_lm_head.pt": 1})
    hub.fetch("owner/there", None, lambda _stage: None, offline=False)
    ((_, patterns),) = fake.downloads
    assert {"model.safetensors", "medusa_lm_head.pt"} <= set(patterns)


def test_a_disk_that_fills_up_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeHub(monkeypatch, tmp_path, {"a.safetensors": 10})

    def fill_up(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fill_up)
    with pytest.raises(StorageError, match="disk filled up"):
        hub.fetch("owner/there", None, lambda _stage: None, offline=False)


def test_the_first_published_name_that_exists_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeHub(monkeypatch, tmp_path, {"a.bin": 10})
    names = ["owner/elsewhere", "owner/there"]
    assert hub.fetch_first(names, None, lambda _stage: None, offline=False) == tmp_path
    assert [name for name, _ in fake.downloads] == ["owner/there"]
    with pytest.raises(ModelNotFoundError, match="the hub has no model 'owner/nowhere'"):
        hub.fetch_first(["owner/a", "owner/nowhere"], None, lambda _stage: None, offline=False)


def test_a_download_larger_than_the_disk_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FakeHub(monkeypatch, tmp_path, {"a.safetensors": 10**18})
    with pytest.raises(StorageError, match="needs 1000000.0 TB of disk"):
        hub.fetch("owner/there", None, lambda _stage: None, offline=False)


@pytest.mark.parametrize("error", [ConnectionError, type("HttpLibraryError", (Exception,), {})])
def test_no_network_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[Exception]
) -> None:
    fake = FakeHub(monkeypatch, tmp_path, {})

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise error("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ModelNotFoundError, match="Check the network"):
        hub.fetch("owner/there", None, lambda _stage: None, offline=False)
    assert not fake.downloads
