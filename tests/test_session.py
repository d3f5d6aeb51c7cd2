"""The Python API: `load`, `generate`, `stream`."""

import json
import socket
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import medusa_cli
from conftest import (
    CHAT_TEMPLATE,
    CONTEXT,
    EOS,
    VOCAB,
    ScriptedDrafter,
    byte_tokenizer,
    head_tensors,
    tiny_base,
    tiny_module,
)
from medusa_cli.config import FinishReason, Limits, Overflow, SamplingConfig
from medusa_cli.decoding.tree import ROOT_ONLY, load_tree, static_tree
from medusa_cli.errors import (
    CheckpointError,
    ContextLengthError,
    ModelNotFoundError,
    TreeError,
    UnsupportedModelError,
    UsageError,
)
from medusa_cli.models import loader
from medusa_cli.models.cache import KVCache
from medusa_cli.models.heads import HeadKind, Heads, HeadsInfo
from medusa_cli.session import Medusa
from medusa_cli.text.events import Result, Started, Step


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_sockets")
def test_a_local_model_is_loaded_and_generates_offline(model_folder: Path) -> None:
    model = medusa_cli.load(str(model_folder), offline=True)
    plain = medusa_cli.load(str(model_folder), plain=True, offline=True)
    limits = Limits(max_new_tokens=30, ignore_eos=True)
    result = model.generate("Hello", limits=limits)
    assert result.token_ids == plain.generate("Hello", limits=limits).token_ids
    assert len(result.token_ids) == 30
    assert result.text == model.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.tree == load_tree("mc_sim_7b_7")


@pytest.mark.usefixtures("no_sockets")
@pytest.mark.parametrize("safe", [True, False])
def test_medusa_2_full_layout_works_offline(tmp_path: Path, safe: bool) -> None:
    """The base model's tensors and `medusa_head.*` in one checkpoint."""
    tiny_module().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {name: tensor.clone() for name, tensor in tiny_module().state_dict().items()}
    state |= {f"medusa_head.{name}": tensor for name, tensor in head_tensors(3).items()}
    if safe:
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"medusa_num_heads": 3, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = medusa_cli.load(str(tmp_path), offline=True)
    assert model.heads is not None
    assert model.heads.info.num_heads == 3
    limits = Limits(max_new_tokens=20, ignore_eos=True)
    expected = Medusa("tiny", tiny_base(), byte_tokenizer(), None, ROOT_ONLY)
    assert (
        model.generate("Hello", limits=limits).token_ids
        == expected.generate("Hello", limits=limits).token_ids
    )


@pytest.mark.usefixtures("no_sockets")
def test_v1_heads_file_works_offline(model_folder: Path, tmp_path: Path) -> None:
    heads = tmp_path / "mine.pt"
    torch.save(head_tensors(2), heads)
    model = medusa_cli.load(str(model_folder), heads=str(heads), offline=True)
    assert model.heads is not None
    assert model.heads.info.num_heads == 2
    assert model.tree.depth == 2, "the default tree is cut to what the heads can draft"


def test_a_tree_deeper_than_the_heads_is_refused_before_any_forward(
    model_folder: Path, tmp_path: Path
) -> None:
    torch.save(head_tensors(2), tmp_path / "two.pt")
    with pytest.raises(TreeError, match="there are 2 heads"):
        medusa_cli.load(str(model_folder), heads=str(tmp_path / "two.pt"), tree="mc_sim_7b_63")


def test_heads_recommend_their_tree(model_folder: Path, tmp_path: Path) -> None:
    save_file(head_tensors(4), tmp_path / "medusa_heads.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tree": "zephyr_stage2"}))
    assert medusa_cli.load(str(model_folder), heads=str(tmp_path)).tree.name == "zephyr_stage2"


class ScriptedHeads(Heads):
    """Heads that propose what a scripted drafter does."""

    def __init__(self, drafter: ScriptedDrafter) -> None:
        self.info = HeadsInfo("scripted", HeadKind.MEDUSA, 4, 1, VOCAB)
        self.propose = drafter.propose  # type: ignore[method-assign]  # the drafter's own


def scripted(truth_from: int = 40, *, eos: bool = False) -> tuple[Medusa, KVCache, list[int]]:
    """A tiny model whose drafts are always right, its cache, and the ids of prompt and answer."""
    base = tiny_base()
    tokenizer = byte_tokenizer()
    plain = Medusa("tiny", base, tokenizer, None, ROOT_ONLY)
    limits = Limits(max_new_tokens=truth_from, ignore_eos=True)
    prompt = list(b"Hello")
    truth = prompt + list(plain.generate("Hello", limits=limits).token_ids)
    cache = KVCache()
    drafter = ScriptedDrafter(cache, truth, rank=0)
    heads = ScriptedHeads(drafter)
    if eos:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(truth[12])
    tree = static_tree("chain", [[0], [0, 0], [0, 0, 0]])
    return Medusa("tiny", base, tokenizer, heads, tree), cache, truth


def test_events_come_in_order_and_add_up() -> None:
    model, cache, truth = scripted()
    limits = Limits(max_new_tokens=23, ignore_eos=True)
    started, *steps, result = model.stream("Hello", limits=limits, cache=cache)
    assert started == Started(prompt_tokens=5)
    assert all(isinstance(step, Step) for step in steps)
    assert isinstance(result, Result)
    assert [t for step in steps for t in step.token_ids] == list(result.token_ids) == truth[5:28]
    assert "".join(step.text for step in steps) == result.text
    assert [step.accept_length for step in steps] == [0, *result.accept_lengths]
    assert result.accept_lengths == (4, 4, 4, 4, 4, 2)
    assert sum(result.accept_lengths) == len(result.token_ids) - 1
    assert result.histogram == {2: 1, 4: 5}
    assert result.mean_accept_length == pytest.approx(22 / 6)
    assert result.finish_reason is FinishReason.LENGTH
    assert [piece.depth for piece in steps[1].pieces] == [1, 2, 3, 0]


def test_the_tokenizers_eos_counts_too() -> None:
    model, cache, truth = scripted(eos=True)
    result = model.generate("Hello")
    first = next(i for i, token in enumerate(truth[5:]) if token in (truth[12], EOS))
    assert list(result.token_ids) == truth[5 : 6 + first]
    assert result.finish_reason is FinishReason.EOS
    del cache


def test_stop_string_cuts_text_tokens_and_cache() -> None:
    model, cache, truth = scripted()
    whole = model.generate("Hello", limits=Limits(max_new_tokens=30, ignore_eos=True)).text
    stop = next(whole[i : i + 2] for i in range(9, 20) if whole[i : i + 2].isascii())
    limits = Limits(max_new_tokens=30, ignore_eos=True, stop=(stop,))
    *_, result = model.stream("Hello", limits=limits, cache=cache)
    assert isinstance(result, Result)
    assert result.finish_reason is FinishReason.STOP
    assert result.text == whole[: whole.index(stop)]
    kept = 5 + len(result.token_ids)
    assert truth[5:kept] == list(result.token_ids)
    assert cache.ids == truth[: len(cache.ids)]
    assert len(cache.ids) in (kept - 1, kept)


def test_should_stop_ends_at_the_next_step() -> None:
    model, cache, _ = scripted()
    seen: list[Step] = []
    *_, result = (
        seen.append(event) or event if isinstance(event, Step) else event
        for event in model.stream("Hello", cache=cache, should_stop=lambda: len(seen) == 2)
    )
    assert isinstance(result, Result)
    assert result.finish_reason is FinishReason.INTERRUPTED
    assert len(seen) == 3


def test_a_consumer_that_leaves_early_finds_a_right_cache() -> None:
    model, cache, truth = scripted()
    stream = model.stream("Hello", cache=cache, limits=Limits(max_new_tokens=30, ignore_eos=True))
    next(stream)
    taken = [event for event in islice(stream, 3) if isinstance(event, Step)]
    emitted = [token for step in taken for token in step.token_ids]
    stream.close()
    assert cache.ids == truth[: 5 + len(emitted) - 1]


def test_messages_text_and_ids_are_prompts(model_folder: Path) -> None:
    model = medusa_cli.load(str(model_folder), plain=True)
    assert model.has_template
    as_chat = model.encode("hi")
    assert as_chat == model.encode([{"role": "user", "content": "hi"}])
    assert as_chat == byte_tokenizer(CHAT_TEMPLATE)("<|user|>hi<|assistant|>").input_ids
    assert model.encode("hi", chat=False) == list(b"hi")
    assert model.encode(as_chat) == as_chat
    with pytest.raises(UsageError, match="empty"):
        model.encode([])


def test_the_context_limit() -> None:
    model = Medusa("tiny", tiny_base(), byte_tokenizer(), None, ROOT_ONLY)
    everything = Limits(max_new_tokens=None, ignore_eos=True)
    result = model.generate("x" * (CONTEXT - 5), limits=everything)
    assert result.finish_reason is FinishReason.CONTEXT
    assert len(result.token_ids) == 5
    with pytest.raises(ContextLengthError):
        model.generate("x" * CONTEXT, limits=everything)
    cut = replace(everything, on_overflow=Overflow.TRUNCATE_LEFT)
    result = model.generate("y" * 50 + "x" * (CONTEXT - 1), limits=cut)
    assert result.prompt_tokens == CONTEXT - 1
    assert len(result.token_ids) == 1


def test_heads_that_never_help_are_warned_about() -> None:
    model, cache, _ = scripted()
    assert model.heads is not None
    useless = ScriptedDrafter(cache, [], rank=None)
    useless.truth = [0] * 200
    model = replace(model, heads=ScriptedHeads(useless))
    limits = Limits(max_new_tokens=30, ignore_eos=True)
    *_, result = model.stream("Hello", limits=limits, cache=cache)
    assert isinstance(result, Result)
    if max(result.accept_lengths) == 1:
        assert any("no draft was accepted in 28 steps" in w for w in result.warnings)
    else:
        pytest.fail("the drafts were meant to be wrong")


def test_model_defaults_come_from_the_generation_config(model_folder: Path) -> None:
    path = model_folder / "generation_config.json"
    values = json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    path.write_text(json.dumps(values))
    model = medusa_cli.load(str(model_folder), plain=True)
    defaults = model.sampling_defaults()
    assert defaults["temperature"] == 0.6
    assert defaults["top_p"] == 0.9
    SamplingConfig(**defaults)
    greedy = Medusa("tiny", tiny_base(), byte_tokenizer(), None, ROOT_ONLY)
    assert "temperature" not in greedy.sampling_defaults()


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b'{"model_type": "nope"}'])
def test_damaged_model_folders_are_one_error(
    model_folder: Path, broken: str, content: bytes | None
) -> None:
    if content is None:
        (model_folder / broken).unlink()
    else:
        (model_folder / broken).write_bytes(content)
    with pytest.raises((CheckpointError, ModelNotFoundError)):
        medusa_cli.load(str(model_folder), offline=True)


def test_a_device_that_is_not_there() -> None:
    for name in ("cuda:7", "nonsense", "cpu:3"):
        with pytest.raises(UsageError, match="--device"):
            loader._device(name)


def test_unsupported_models_are_refused_with_the_reason() -> None:
    module = tiny_module("qwen2")
    module.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention layers"):
        medusa_cli.models.base.BaseModel(module)
    module = tiny_module()
    module.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="flash_attention_2"):
        medusa_cli.models.base.BaseModel(module)


def test_transformers_out_of_range_is_refused(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "version", lambda _package: "4.40.0")
    with pytest.raises(UnsupportedModelError, match=r"transformers 4\.40\.0 is installed"):
        medusa_cli.load(str(model_folder), offline=True)
