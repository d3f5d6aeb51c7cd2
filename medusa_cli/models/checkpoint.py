"""Loading heads. The layout is told from the tensor names, never from the config.

Three layouts that the reference implementation writes, and our own:

    v1, v2         `{h}.{l}.linear.{weight,bias}`; v1 also `{h}.{L}.weight`, the head's LM head
    full model     the same behind `medusa_head.`, among the base model's tensors
    medusa-heads   the same, with `{h}.input.{weight,bias}` and `draft_token_ids`
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import CheckpointError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.heads import Head, HeadKind, Heads, HeadsInfo
from medusa_cli.models.tensor_files import read_json, read_tensors, sharded_files

HEADS_FILES = ("medusa_heads.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
FULL_MODEL_PREFIX = "medusa_head."
_NAME = re.compile(
    r"(?P<head>\d+)\."
    r"(?:(?P<layer>\d+)\.linear\.(?P<part>weight|bias)"
    r"|(?P<lm_head>\d+)\.weight"
    r"|input\.(?P<input>weight|bias))"
)


@dataclass(frozen=True, slots=True)
class HeadsFiles:
    """Where a set of heads lies on disk.

    Attributes:
        tensors: files that hold their tensors.
        prefix: what stands before each tensor name.
        config: their config file, which may be absent.
    """

    tensors: tuple[Path, ...]
    prefix: str
    config: Path | None


@dataclass(slots=True)
class _HeadTensors:
    """The tensors of one head, sorted by what they are for."""

    linear: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    input: dict[str, Tensor] = field(default_factory=dict)
    lm_head: Tensor | None = None
    lm_head_index: int | None = None

    def layers(self) -> int:
        return 1 + max((layer for layer, _ in self.linear), default=-1)

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"layers.{layer}.linear.{part}": t for (layer, part), t in self.linear.items()}
        state |= {f"input.{part}": tensor for part, tensor in self.input.items()}
        return state if self.lm_head is None else state | {"lm_head.weight": self.lm_head}


def find_heads(path: Path) -> HeadsFiles | None:
    """Looks for heads in a file or directory; None when there are none.

    Raises:
        CheckpointError: a weight file that must be looked into is damaged.
    """
    if path.is_file():
        return HeadsFiles((path,), "", _if_file(path.parent / "config.json"))
    config = _if_file(path / "config.json")
    for name in HEADS_FILES:
        if (path / name).is_file():
            return HeadsFiles((path / name,), "", config)
    shards = sharded_files(path, FULL_MODEL_PREFIX)
    return HeadsFiles(tuple(shards), FULL_MODEL_PREFIX, config) if shards else None


def load_heads(files: HeadsFiles, base: BaseModel, name: str) -> Heads:
    """Loads heads onto the device and into the dtype of the base model's LM head.

    Raises:
        CheckpointError: a missing or unexpected tensor, or sizes that do not fit the base model.
    """
    where = files.tensors[0] if len(files.tensors) == 1 else files.tensors[0].parent
    tensors: dict[str, Tensor] = {}
    for path in files.tensors:
        for key, tensor in read_tensors(path, files.prefix).items():
            tensors[key.removeprefix(files.prefix)] = tensor
    draft_ids = tensors.pop("draft_token_ids", None)
    groups = _group(tensors, where)
    _check_complete(groups, where)
    _check_sizes(groups, draft_ids, base, where)
    config = {} if files.config is None else read_json(files.config)
    info = _info(name, groups, draft_ids, base, config, files)
    device, dtype = _lm_head_home(base)
    modules = nn.ModuleList(_build(group, base.hidden_size, device, dtype) for group in groups)
    shared: nn.Module = base.lm_head
    if draft_ids is not None:
        draft_ids = draft_ids.to(device, torch.long)
        if groups[0].lm_head is None:
            shared = _lm_head_rows(base, draft_ids)
    base.engine.pack(modules)
    return Heads(info, modules, base.embedding, shared, draft_ids)


def _group(tensors: dict[str, Tensor], where: Path) -> list[_HeadTensors]:
    heads: dict[int, _HeadTensors] = {}
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key)
        if match is None:
            raise CheckpointError(
                f"unexpected tensor '{key}' in {where}: not heads of a layout that medusa reads"
            )
        head = heads.setdefault(int(match["head"]), _HeadTensors())
        if match["layer"] is not None:
            head.linear[int(match["layer"]), match["part"]] = tensor
        elif match["input"] is not None:
            head.input[match["input"]] = tensor
        elif head.lm_head is not None:
            raise CheckpointError(
                f"head {match['head']} in {where} has two LM heads, one is '{key}'"
            )
        else:
            head.lm_head, head.lm_head_index = tensor, int(match["lm_head"])
    if not heads:
        raise CheckpointError(f"no Medusa heads in {where}")
    missing = next((h for h in range(len(heads)) if h not in heads), None)
    if missing is not None:
        raise CheckpointError(f"missing tensor '{missing}.0.linear.weight' in {where}")
    return [heads[h] for h in range(len(heads))]


def _check_complete(groups: list[_HeadTensors], where: Path) -> None:
    """Every head has the same layers, each with weight and bias, and its LM head behind them."""
    layers = max(max(group.layers(), group.lm_head_index or 0) for group in groups)
    conditioned = any(group.input for group in groups)
    own_lm_head = any(group.lm_head is not None for group in groups)
    for h, group in enumerate(groups):
        wanted = [(f"{h}.{n}.linear.{p}", (n, p) in group.linear)
                  for n in range(layers) for p in ("weight", "bias")]  # fmt: skip
        if conditioned:
            wanted += [(f"{h}.input.{p}", p in group.input) for p in ("weight", "bias")]
        if own_lm_head:
            wanted.append((f"{h}.{layers}.weight", group.lm_head_index == layers))
        missing = next((key for key, there in wanted if not there), None)
        if missing is not None:
            raise CheckpointError(f"missing tensor '{missing}' in {where}")


def _check_sizes(
    groups: list[_HeadTensors], draft_ids: Tensor | None, base: BaseModel, where: Path
) -> None:
    width, vocabulary = base.hidden_size, base.vocab_size
    source = "the base model's vocabulary"
    if draft_ids is not None:
        ids = (
            draft_ids.long() if not draft_ids.is_floating_point() and draft_ids.dim() == 1 else None
        )
        if ids is None or len(ids) == 0 or len(set(ids.tolist())) != len(ids):
            raise CheckpointError(f"draft_token_ids in {where} must be distinct whole numbers")
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise CheckpointError(
                f"draft_token_ids in {where} name token {int(ids.max())}, "
                f"but the base model has {vocabulary} tokens: these heads belong to another model"
            )
        vocabulary, source = len(ids), "draft_token_ids"
    shapes = {"input.weight": (width, 2 * width), "lm_head.weight": (vocabulary, width)}
    for h, group in enumerate(groups):
        for key, tensor in group.state_dict().items():
            default = (width,) if key.endswith("bias") else (width, width)
            wanted = shapes.get(key, default)
            if tuple(tensor.shape) != wanted:
                raise CheckpointError(
                    f"head {h + 1} in {where}: {key} has shape {list(tensor.shape)}, but "
                    f"hidden size {width} and {source} ask for {list(wanted)}.\n"
                    "These heads belong to another base model."
                )
            if not tensor.is_floating_point():
                raise CheckpointError(f"head {h + 1} in {where}: {key} holds {tensor.dtype}")


def _info(
    name: str,
    groups: list[_HeadTensors],
    draft_ids: Tensor | None,
    base: BaseModel,
    config: dict[str, Any],
    files: HeadsFiles,
) -> HeadsInfo:
    warnings = []
    said = config.get("medusa_num_heads", config.get("num_heads"))
    if said is not None and said != len(groups):
        warnings.append(f"the heads' config says {said} heads, their tensors hold {len(groups)}")
    accuracy = config.get("accuracy")
    rows = accuracy.get("rank_accuracy") if isinstance(accuracy, dict) else None
    tree = config.get("tree")
    return HeadsInfo(
        name=name,
        kind=HeadKind.CONDITIONED if groups[0].input else HeadKind.MEDUSA,
        num_heads=len(groups),
        num_layers=groups[0].layers(),
        vocabulary=base.vocab_size if draft_ids is None else len(draft_ids),
        rank_accuracy=tuple(tuple(map(float, row)) for row in rows or ()),
        tree=tree if isinstance(tree, str) else None,
        warnings=tuple(warnings),
        files=files,
    )


def _build(group: _HeadTensors, width: int, device: torch.device, dtype: torch.dtype) -> Head:
    rows = None if group.lm_head is None else group.lm_head.shape[0]
    with torch.device("meta"):  # the tensors below become the parameters: nothing is made twice
        head = Head(width, group.layers(), bool(group.input), rows)
    state = {key: t.to(device, dtype, copy=True) for key, t in group.state_dict().items()}
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False)


def _lm_head_home(base: BaseModel) -> tuple[torch.device, torch.dtype]:
    """Where heads live and in which precision: with the LM head, unless that is quantised."""
    weight = next(base.lm_head.parameters(), None)
    if weight is None:
        return base.device, base.dtype
    return weight.device, weight.dtype if weight.is_floating_point() else base.dtype


def _lm_head_rows(base: BaseModel, rows: Tensor) -> nn.Module:
    """A linear layer of the LM head's rows for the draft vocabulary, [V', D]."""
    weight, bias = base.engine.weight_rows(base.lm_head, rows), getattr(base.lm_head, "bias", None)
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], len(rows), bias=bias is not None)
    state = {"weight": weight}
    if bias is not None:
        state["bias"] = bias.detach()[rows]
    linear.load_state_dict(state, assign=True)
    return base.engine.pack(linear.requires_grad_(False))


def _if_file(path: Path) -> Path | None:
    return path if path.is_file() else None
