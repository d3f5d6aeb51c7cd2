"""Head checkpoints: every layout that the reference implementation writes, and ours."""

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conftest import HIDDEN, VOCAB, head_tensors, tiny_base, tiny_module
from medusa_cli.errors import CheckpointError
from medusa_cli.models.checkpoint import HeadsFiles, find_heads, load_heads
from medusa_cli.models.heads import HeadKind, Heads

HIDDEN_ROW = torch.linspace(-1, 1, HIDDEN)
PENDING = torch.tensor(3)


def load(path: Path) -> Heads:
    files = find_heads(path)
    assert isinstance(files, HeadsFiles)
    return load_heads(files, tiny_base(), "heads")


def by_hand(tensors: dict[str, Tensor], heads: int, layers: int) -> list[Tensor]:
    """Logits of heads with their own LM heads, straight from the tensors."""
    logits = []
    for h in range(heads):
        x = HIDDEN_ROW
        for layer in range(layers):
            linear = tensors[f"{h}.{layer}.linear.weight"] @ x + tensors[f"{h}.{layer}.linear.bias"]
            x = x + linear * torch.sigmoid(linear)
        weight = tensors.get(f"{h}.{layers}.weight")
        weight = tiny_base().lm_head.weight if weight is None else weight
        logits.append(weight @ x)
    return logits


def save_safetensors(tensors: dict[str, Tensor], folder: Path) -> Path:
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def save_pt(tensors: dict[str, Tensor], folder: Path) -> Path:
    torch.save(OrderedDict(tensors), folder / "medusa_lm_head.pt")
    return folder


def save_old_pt(tensors: dict[str, Tensor], folder: Path) -> Path:
    """The format of torch before 1.6, which is no zip file."""
    path = folder / "medusa_lm_head.pt"
    torch.save(OrderedDict(tensors), path, _use_new_zipfile_serialization=False)
    return path


@pytest.mark.parametrize("save", [save_safetensors, save_pt, save_old_pt])
@pytest.mark.parametrize(("layers", "lm_head"), [(1, True), (3, True), (1, False), (2, False)])
def test_v1_and_v2_files_load(
    tmp_path: Path, save: Callable[[dict[str, Tensor], Path], Path], layers: int, lm_head: bool
) -> None:
    tensors = head_tensors(3, layers, lm_head=lm_head)
    heads = load(save(tensors, tmp_path))
    assert (heads.info.num_heads, heads.info.num_layers) == (3, layers)
    assert heads.info.kind is HeadKind.MEDUSA
    expected = torch.stack(by_hand(tensors, 3, layers))
    torch.testing.assert_close(heads.logits(HIDDEN_ROW, PENDING, 3), expected.detach())


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_heads_in_a_full_model_load(tmp_path: Path, safe: bool, sharded: bool) -> None:
    tensors = head_tensors(2)
    module = tiny_module()
    module.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    base = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    stem = "model.safetensors" if safe else "pytorch_model.bin"
    shards = [base, prefixed] if sharded else [base | prefixed]
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        first, last = stem.split(".")
        name = f"{first}-{i:05}-of-{len(shards):05}.{last}" if sharded else stem
        if safe:
            save_file(shard, tmp_path / name, metadata={"format": "pt"})
        else:
            torch.save(shard, tmp_path / name)
        weight_map |= dict.fromkeys(shard, name)
    if sharded:
        (tmp_path / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    heads = load(tmp_path)
    expected = torch.stack(by_hand(tensors, 2, 1))
    torch.testing.assert_close(heads.logits(HIDDEN_ROW, PENDING, 2), expected)


def test_our_layout_loads_conditioned_heads_with_a_draft_vocabulary(tmp_path: Path) -> None:
    tensors = head_tensors(2, lm_head=False, conditioned=True)
    tensors["draft_token_ids"] = torch.tensor([9, 4, 200], dtype=torch.int32)
    save_file(tensors, tmp_path / "medusa_heads.safetensors")
    config = {"num_heads": 2, "accuracy": {"rank_accuracy": [[0.5, 0.1], [0.2, 0.1]]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = load(tmp_path)
    assert heads.info.kind is HeadKind.CONDITIONED
    assert heads.info.vocabulary == 3
    assert heads.info.rank_accuracy == ((0.5, 0.1), (0.2, 0.1))
    assert not heads.info.warnings
    assert set(heads.propose(HIDDEN_ROW, PENDING, 2, 3).flatten().tolist()) == {9, 4, 200}


def test_count_comes_from_the_tensors_and_a_wrong_config_is_a_warning(tmp_path: Path) -> None:
    """As published: a config without model_type that says 2 heads where the tensors hold 5."""
    save_pt(head_tensors(5), tmp_path)
    config = {"base_model_name_or_path": "N/A", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = load(tmp_path)
    assert heads.info.num_heads == 5
    assert heads.info.warnings == ("the heads' config says 2 heads, their tensors hold 5",)


def test_heads_take_the_base_models_precision(tmp_path: Path) -> None:
    save_safetensors({k: t.half() for k, t in head_tensors(1).items()}, tmp_path)
    assert {p.dtype for p in load(tmp_path).heads.parameters()} == {torch.float32}


def test_residual_layers_are_not_aliased(tmp_path: Path) -> None:
    heads = load(save_safetensors(head_tensors(2, layers=3), tmp_path))
    parameters = list(heads.heads.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in head_tensors(2, layers=2).items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (without("1.0.linear.bias"), "missing tensor '1.0.linear.bias'"),
        (without("1.1.linear.weight"), "missing tensor '1.1.linear.weight'"),
        (without("0.2.weight"), "missing tensor '0.2.weight'"),
        (head_tensors(1) | {"2.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}, "'1.0.linear"),
        (head_tensors(1) | {"extra": torch.zeros(1)}, "unexpected tensor 'extra'"),
        (head_tensors(1) | {"0.5.weight": torch.zeros(VOCAB, HIDDEN)}, "two LM heads"),
        ({"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN)}, "unexpected tensor 'blocks"),
        ({"0.1.weight": torch.zeros(VOCAB, HIDDEN)}, "missing tensor '0.0.linear.weight'"),
        (
            head_tensors(1) | {"0.0.linear.weight": torch.zeros(HIDDEN + 1, HIDDEN)},
            f"shape [{HIDDEN + 1}, {HIDDEN}], but hidden size {HIDDEN}",
        ),
        (head_tensors(1, rows=VOCAB - 1), f"shape [{VOCAB - 1}, {HIDDEN}]"),
        (
            head_tensors(1) | {"0.0.linear.bias": torch.zeros(HIDDEN, dtype=torch.int32)},
            "torch.int32",
        ),
        ({}, "no Medusa heads"),
        (head_tensors(1) | {"draft_token_ids": torch.tensor([1, 1])}, "distinct"),
        (head_tensors(1) | {"draft_token_ids": torch.tensor([0.5])}, "distinct"),
        (head_tensors(1) | {"draft_token_ids": torch.tensor([VOCAB])}, f"token {VOCAB}, but"),
        (head_tensors(1) | {"draft_token_ids": torch.tensor([1, 2])}, "draft_token_ids ask for"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, tensors: dict[str, Tensor], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(save_safetensors(tensors, tmp_path))
    assert named in str(caught.value)


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return (Path.touch, (Path("exploded"),))  # type: ignore[return-value]


def dump_pickle(data: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(data, protocol=2))


@pytest.mark.parametrize("dump", [torch.save, dump_pickle])
def test_pickled_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dump: Callable[[object, Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    dump({"0.0.linear.weight": Bomb()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="runs no code"):
        load(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK", b"\x00" * 100, b"\xff" * 9, b"{}"])
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        load(tmp_path)


@pytest.mark.parametrize("save", [save_safetensors, save_pt])
def test_truncated_files_are_refused(
    tmp_path: Path, save: Callable[[dict[str, Tensor], Path], Path]
) -> None:
    save(head_tensors(1), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_other_objects_than_tensors_are_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="not a mapping"):
        load(tmp_path)


def test_folders_without_heads_have_none(tmp_path: Path) -> None:
    assert find_heads(tmp_path) is None
    tiny_module().save_pretrained(tmp_path)
    assert find_heads(tmp_path) is None


def test_damaged_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="weight_map"):
        find_heads(tmp_path)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"medusa_head.0.0.linear.weight": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors does not exist"):
        load(tmp_path)
