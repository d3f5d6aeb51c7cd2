"""`medusa models`: list, fetch and remove models."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.cli.opening import quiet_libraries
from medusa_cli.cli.options import Offline, Plain, Quiet, TableFormat
from medusa_cli.cli.streams import Streams
from medusa_cli.errors import ModelNotFoundError, UsageError
from medusa_cli.models import registry
from medusa_cli.models.storage import embedded_folder, human_bytes

app = typer.Typer(help="List, fetch and remove models.", rich_markup_mode=None)


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the registry and what of it is on disk.

    Attributes:
        name: the alias.
        about: one line.
        parameters: of the base model.
        source: hub ids or the Python package.
        heads: where its heads come from.
        tree: for accelerators.
        small_tree: for CPUs.
        bytes_on_disk: 0 when it is not fetched.
    """

    name: str
    about: str
    parameters: int
    source: str
    heads: str
    tree: str
    small_tree: str
    bytes_on_disk: int


@app.callback(invoke_without_command=True)
def list_models(
    context: typer.Context,
    format_: Annotated[TableFormat, typer.Option("--format")] = TableFormat.TABLE,
) -> None:
    """List the names that --model takes, with sizes, heads, trees and what is on disk."""
    if context.invoked_subcommand is not None:
        return
    rows = [_row(name, entry) for name, entry in registry.entries().items()]
    streams = Streams.of_process()
    if format_ is TableFormat.JSON:
        streams.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        return
    for row in rows:
        default = " (default)" if row.name == registry.DEFAULT_MODEL else ""
        disk = human_bytes(row.bytes_on_disk) if row.bytes_on_disk else "not fetched"
        streams.write(
            f"{row.name}{default}\n"
            f"    {row.about}\n"
            f"    size   {row.parameters / 1e9:.3g}B parameters, "
            f"{human_bytes(row.parameters * 2)} in half precision; on disk: {disk}\n"
            f"    from   {row.source}\n"
            f"    heads  {row.heads}\n"
            f"    tree   {row.tree} (GPU), {row.small_tree} (CPU)\n"
        )


@app.command()
def fetch(name: str, plain: Plain = False, offline: Offline = False, quiet: Quiet = False) -> None:
    """Download a model and its heads (with --plain, the base model alone)."""
    streams = Streams.of_process()
    from medusa_cli.cli.loading import LoadProgress

    with LoadProgress(streams, name, quiet=quiet) as report:
        quiet_libraries(offline=offline, progress=streams.stderr.isatty() and not quiet)
        from medusa_cli.models.sources import Finder

        source = Finder(offline=offline, report=report).find(name, plain=plain)
    streams.write(f"{source.folder}\n")


@app.command()
def rm(name: str) -> None:
    """Remove a model's files from the cache."""
    entry = registry.entries().get(name)
    if entry is None and not registry.is_hub_id(name):
        raise registry.unknown_model(name)
    if entry is not None and entry.embedded:
        folders = [embedded_folder(name)]
    else:
        repositories = [name] if entry is None else [*entry.model, *filter(None, [entry.heads])]
        folders = [_hub_folder(repository) for repository in repositories]
    there = [folder for folder in folders if folder.is_dir()]
    if not there:
        raise ModelNotFoundError(f"'{name}' is not on disk: nothing to remove")
    size = sum(_folder_bytes(folder) for folder in there)
    for folder in there:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise UsageError(f"{folder} cannot be removed: {error.strerror or error}") from None
    Streams.of_process().write(f"removed {name}: {human_bytes(size)}\n")


def _row(name: str, entry: registry.Entry) -> Row:
    if entry.embedded:
        folders = [embedded_folder(name)]
    else:
        folders = [_hub_folder(r) for r in (*entry.model, *filter(None, [entry.heads]))]
    return Row(
        name=name,
        about=entry.about,
        parameters=entry.parameters,
        source=" or ".join(entry.model) or "a Python package, converted on first use",
        heads="with the model" if entry.heads is None else _heads_name(entry.heads),
        tree=entry.tree,
        small_tree=entry.small_tree,
        bytes_on_disk=sum(_folder_bytes(folder) for folder in folders),
    )


def _heads_name(heads: str) -> str:
    return heads if registry.builtin_heads(heads) is None else "shipped with medusa"


def _hub_folder(repository: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / name


def _folder_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
