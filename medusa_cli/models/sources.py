"""From what the user typed to files on disk: the base model's folder and its heads."""

from dataclasses import dataclass
from pathlib import Path

from medusa_cli.errors import ModelNotFoundError
from medusa_cli.models import hub, registry
from medusa_cli.models.checkpoint import HEADS_FILES, HeadsFiles, find_heads
from medusa_cli.models.embedded import ensure_embedded
from medusa_cli.models.progress import Report, silent
from medusa_cli.models.tensor_files import read_json

MODEL_FILES = ("model*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class Source:
    """A model by name, found on disk.

    Attributes:
        name: as the user gave it.
        folder: the base model's files.
        heads_name: how the user would name its heads; None when decoding plainly.
        heads: their files; None when decoding plainly.
        entry: what the registry says, or defaults for a model that it does not list.
    """

    name: str
    folder: Path
    heads_name: str | None
    heads: HeadsFiles | None
    entry: registry.Entry


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds models and heads by alias, hub id or path, and fetches what is not on disk yet.

    Attributes:
        revision: of the base model's hub repository.
        offline: open no connection.
        report: hears about downloads.
    """

    revision: str | None = None
    offline: bool = False
    report: Report = silent

    def find(self, model: str, heads: str | None = None, *, plain: bool = False) -> Source:
        """Finds a base model and, unless `plain`, its heads.

        Args:
            model: alias, hub id or directory; a heads repository stands for its base model too.
            heads: alias, hub id, directory or file; None looks for the model's own.

        Raises:
            ModelNotFoundError: no such model, or no heads for it.
            CheckpointError: an index or config file is damaged.
        """
        folder, entry = self._base(model)
        base = _base_of_heads(folder)
        if base is not None:
            heads = heads or model
            entry = next((e for e in registry.entries().values() if e.heads == model), entry)
            folder, _ = self._base(base)
        if plain:
            return Source(model, folder, None, None, entry)
        files: HeadsFiles | None
        if heads is not None:
            files = self._named_heads(heads)
        elif entry.heads is not None:
            files = find_heads(self._fetched_heads(entry.heads))
        else:
            files = find_heads(folder)
        if files is None:
            raise ModelNotFoundError(
                f"no Medusa heads found for '{model}': give some with --heads, "
                "or decode without them with --plain"
            )
        return Source(model, folder, heads or entry.heads or model, files, entry)

    def _base(self, model: str) -> tuple[Path, registry.Entry]:
        entry = registry.entries().get(model)
        if entry is None:
            folder = self._place(model, self.revision)
            if folder is None or not folder.is_dir():
                raise registry.unknown_model(model)
            return folder, registry.Entry(about=model)
        if entry.embedded:
            return ensure_embedded(model, self.report, offline=self.offline), entry
        return hub.fetch_first(entry.model, self.revision, self.report, offline=self.offline), entry

    def _named_heads(self, heads: str) -> HeadsFiles:
        alias = registry.entries().get(heads)
        if alias is None:
            place = self._place(heads, None)
        else:
            place = self._fetched_heads(alias.heads) if alias.heads else self._base(heads)[0]
        if place is None:
            raise ModelNotFoundError(f"no heads '{heads}': give a file, a directory or a hub id")
        files = find_heads(place)
        if files is None:
            raise ModelNotFoundError(
                f"'{heads}' holds no Medusa heads (looked for {', '.join(HEADS_FILES)})"
            )
        return files

    def _fetched_heads(self, heads: str) -> Path:
        builtin = registry.builtin_heads(heads)
        return builtin or hub.fetch(heads, None, self.report, offline=self.offline)

    def _place(self, name: str, revision: str | None) -> Path | None:
        """An existing file or directory, else a hub repository's snapshot, else None."""
        path = Path(name).expanduser()
        if path.exists():
            return path
        if path.is_absolute() or name.startswith((".", "~")) or not registry.is_hub_id(name):
            return None
        return hub.fetch(name, revision, self.report, offline=self.offline)


def _base_of_heads(folder: Path) -> str | None:
    """The base model's name when a folder holds heads alone; None when it holds a model."""
    has_heads = any((folder / name).is_file() for name in HEADS_FILES)
    has_model = any(any(folder.glob(pattern)) for pattern in MODEL_FILES)
    if has_model or not has_heads:
        return None
    config_file = folder / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    base = config.get("base_model_name_or_path", config.get("base_model"))
    if not isinstance(base, str) or base in ("", "N/A"):
        raise ModelNotFoundError(
            f"{folder} holds heads alone, and their config does not name the base model.\n"
            f"Give both: --model BASE --heads {folder}"
        )
    return base
