"""Where measured results of heads lie, and whose they are.

Results of heads that the user keeps in a folder lie beside them. Those of heads that came with the
package or from the hub lie in the cache folder; the package may bring some of its own.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from medusa_cli.decoding import calibration, head_accuracy, scores, traces
from medusa_cli.decoding.calibration import Calibration, KeptCalibration
from medusa_cli.decoding.head_accuracy import AccuracyTable
from medusa_cli.decoding.scores import Scores
from medusa_cli.decoding.traces import Traces
from medusa_cli.errors import CheckpointError, StorageError
from medusa_cli.models import registry
from medusa_cli.models.checkpoint import HeadsFiles
from medusa_cli.models.progress import Report, Stage, silent
from medusa_cli.models.storage import cache_folder, write_atomic
from medusa_cli.models.tensor_files import read_json, read_tensors, tensors_sha256

TRACES, ACCURACY = "traces.json", "accuracy.json"
CALIBRATION, SCORES = "calibration.json", "scores.safetensors"
_PACKAGE = Path(__file__).parents[1]
_Results = TypeVar("_Results", Traces, AccuracyTable, KeptCalibration)


@dataclass(frozen=True, slots=True)
class Subject:
    """What results belong to: heads on a base model.

    Attributes:
        heads, base: names that do not depend on the working directory.
        files: the heads' files.
    """

    heads: str
    base: str
    files: HeadsFiles


def subject(heads: str, base: str, files: HeadsFiles) -> Subject:
    """Heads and base model by the names that the user gave them; of a path only the end counts."""
    return Subject(_name(heads), _name(base), files)


def load_traces(of: Subject, report: Report = silent) -> Traces | None:
    """The traces measured for a subject, or None.

    Args:
        report: hears of files that were measured with other heads; they do not count.

    Raises:
        CheckpointError: a file is damaged.
    """
    return next(_found(of, TRACES, traces.from_json, report), None)


def load_accuracy(of: Subject, report: Report = silent) -> AccuracyTable | None:
    """The accuracy measured for a subject, or None; arguments and errors as in `load_traces`."""
    return next(_found(of, ACCURACY, head_accuracy.from_json, report), None)


def load_calibration(of: Subject, report: Report = silent) -> Calibration | None:
    """The calibration measured for a subject, or None; arguments and errors as in `load_traces`."""
    found = next(_found(of, CALIBRATION, calibration.from_json, report), None)
    return None if found is None else found.calibration


def config_accuracy(of: Subject) -> tuple[tuple[float, ...], ...]:
    """[K][ranks], the rank accuracies that the heads' config states; empty if it states none.

    Rows for more heads than the files hold do not count.

    Raises:
        CheckpointError: the config is damaged.
    """
    config = {} if of.files.config is None else read_json(of.files.config)
    accuracy = config.get("accuracy")
    rows = accuracy.get("rank_accuracy") if isinstance(accuracy, dict) else None
    num_heads = len({name.split(".")[0] for name in _tensors(of.files) if name[0].isdigit()})
    try:
        return tuple(tuple(map(float, row)) for row in (rows or ())[:num_heads])
    except (TypeError, ValueError):
        raise CheckpointError(
            f"rank_accuracy in {of.files.config} is no table of numbers: "
            "measure the heads with `medusa accuracy`"
        ) from None


def results_folder(of: Subject) -> Path:
    """Where results are kept: beside the heads if the folder is the user's and can be written."""
    beside = _beside(of)
    return beside if _is_users(beside) and os.access(beside, os.W_OK | os.X_OK) else _in_cache(of)


def make_folder(folder: Path) -> None:
    """Makes a folder for results, before the time for measuring them is spent.

    Raises:
        StorageError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise StorageError(f"{folder} cannot be written: {reason}; choose another with --out")


@dataclass(frozen=True, slots=True)
class ScoredTraces:
    """Traces with how sure the heads were along them, where that was kept."""

    traces: Traces
    scores: Scores | None


def load_scored_traces(of: Subject, report: Report = silent) -> ScoredTraces | None:
    """The traces of `load_traces`, with the scores beside them.

    Raises:
        CheckpointError: a file is damaged.
    """
    for folder in _folders(of):
        path = folder / SCORES
        found = next(_found(of, TRACES, traces.from_json, report, (folder,)), None)
        if found is None:
            continue
        if not path.is_file():
            return ScoredTraces(found, None)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise traces.damaged(str(path), str(error)) from None
        return ScoredTraces(found, scores.from_bytes(content, found, str(path)))
    return None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration and the scores along the traces that it was fit to."""

    calibration: Calibration
    scores: Scores


def save(folder: Path, found: Traces, fitted: Calibrated | None = None) -> bool:
    """Writes traces, their accuracy, and the heads' calibration with its scores.

    Returns:
        False, and writes nothing, if that would replace complete results by partial ones.

    Raises:
        StorageError: the folder cannot be written.
    """
    if not found.provenance.complete and _is_complete(folder / TRACES):
        return False
    table = head_accuracy.accuracy_table(found)
    write_atomic(folder / TRACES, traces.to_json(found), parents=True)
    write_atomic(folder / ACCURACY, head_accuracy.to_json(table), parents=True)
    if fitted is None:
        (folder / SCORES).unlink(missing_ok=True)  # they belong to other traces
    else:
        about = found.provenance
        write_atomic(folder / CALIBRATION, calibration.to_json(fitted.calibration, about))
        write_atomic(folder / SCORES, scores.to_bytes(fitted.scores))
    return True


def heads_digest(files: HeadsFiles) -> str:
    """SHA-256 of the heads' tensors, the same for the same tensors in another kind of file."""
    return tensors_sha256(_tensors(files))


def _tensors(files: HeadsFiles) -> dict[str, Tensor]:
    return {
        name.removeprefix(files.prefix): tensor
        for path in files.tensors
        for name, tensor in read_tensors(path, files.prefix).items()
    }


def _found(
    of: Subject,
    name: str,
    parse: Callable[[str, str], _Results],
    report: Report,
    folders: Iterable[Path] | None = None,
) -> Iterator[_Results]:
    """The results of a subject, the cache folder's first."""
    digest = ""
    for folder in _folders(of) if folders is None else folders:
        path = folder / name
        if not path.is_file():
            continue
        results = parse(_read(path), str(path))
        digest = digest or heads_digest(of.files)
        if (results.provenance.heads_digest, results.provenance.base) == (digest, of.base):
            yield results
        else:
            report(
                Stage(
                    f"{path} was measured with other heads or another base model: it does not "
                    "count. Measure again with `medusa accuracy`"
                )
            )


def _folders(of: Subject) -> list[Path]:
    return list(dict.fromkeys((_in_cache(of), _beside(of))))


def _name(given: str) -> str:
    path = Path(given).expanduser()
    if given not in registry.entries() and path.exists():
        return path.resolve().name
    builtin = registry.builtin_heads(given)
    return given if builtin is None else builtin.name


def _beside(of: Subject) -> Path:
    return of.files.tensors[0].parent


def _in_cache(of: Subject) -> Path:
    name = of.heads if of.heads == of.base else f"{of.heads} on {of.base}"
    return cache_folder() / "measured" / name.replace("/", "--").replace(" ", "_")


def _is_users(folder: Path) -> bool:
    """Whether the folder is neither the package's, nor the hub cache's, nor our cache's."""
    from huggingface_hub.constants import HF_HUB_CACHE

    others = (_PACKAGE, Path(HF_HUB_CACHE), cache_folder())
    return not any(folder.resolve().is_relative_to(other.resolve()) for other in others)


def _is_complete(path: Path) -> bool:
    try:
        return traces.from_json(_read(path), str(path)).provenance.complete
    except CheckpointError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise traces.damaged(str(path), str(error)) from None
