"""Measuring heads: chunked ranks are those of drafting, and results stay with their heads."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import medusa_cli
from conftest import (
    CHAT_TEMPLATE,
    CONTEXT,
    HIDDEN,
    VOCAB,
    byte_tokenizer,
    head_tensors,
    tiny_base,
)
from medusa_cli.config import Limits
from medusa_cli.decoding import measured
from medusa_cli.decoding.head_accuracy import accuracy_table
from medusa_cli.decoding.measured import (
    Subject,
    config_accuracy,
    heads_digest,
    load_accuracy,
    load_traces,
    results_folder,
    save,
    subject,
)
from medusa_cli.decoding.traces import MISS, Traces
from medusa_cli.decoding.tree import ROOT_ONLY, static_tree
from medusa_cli.errors import CheckpointError, StorageError, UsageError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.checkpoint import HeadsFiles, find_heads
from medusa_cli.models.heads import Head, HeadKind, Heads, HeadsInfo
from medusa_cli.models.progress import Stage
from medusa_cli.session import Medusa
from medusa_cli.text.prompt_files import Question
from medusa_cli.training import accuracy as measuring
from medusa_cli.training.accuracy import (
    PromptSet,
    measure_accuracy,
    measured_subject,
    prompts_digest,
)

PROMPTS = PromptSet("test", "0123456789ab")
DRAFT_IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:200]
CHAIN = static_tree("chain", [[0], [0, 0]])


def heads_of(
    base: BaseModel, *, conditioned: bool = False, lm_head: bool = True, draft: Tensor | None = None
) -> Heads:
    """Three random heads of any kind, bound as `load_heads` binds them."""
    rows = VOCAB if draft is None else len(draft)
    torch.manual_seed(3)
    modules = [Head(HIDDEN, 1, conditioned, rows if lm_head else None) for _ in range(3)]
    kind = HeadKind.CONDITIONED if conditioned else HeadKind.MEDUSA
    shared: nn.Module = base.lm_head
    if draft is not None:
        shared = nn.Linear(HIDDEN, rows, bias=False)
        shared.weight = nn.Parameter(base.lm_head.weight[draft].detach())
    info = HeadsInfo("test", kind, 3, 1, rows)
    return Heads(info, nn.ModuleList(modules).requires_grad_(False), base.embedding, shared, draft)


def medusa(base: BaseModel, heads: Heads | None, template: str | None = None) -> Medusa:
    tree = ROOT_ONLY if heads is None else CHAIN
    return Medusa("tiny", base, byte_tokenizer(template), heads, tree)


@pytest.mark.parametrize("chunk", [1, 5, 31])
def test_hidden_rows_do_not_depend_on_the_chunks(base: BaseModel, chunk: int) -> None:
    """Behind rows in the cache too, and beyond a window; they are what the LM head reads."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (47,), generator=generator)
    with torch.inference_mode():
        expected = base.module(input_ids=ids[None], use_cache=False).logits[0]
    cache = KVCache()
    base.prefill(ids[:9], cache)
    rows = [base.extend(part, cache).hidden for part in ids[9:].split(chunk)]
    hidden = torch.cat(rows)
    assert hidden.shape == (38, HIDDEN)
    assert cache.get_seq_length() == 47
    logits = base.lm_head(hidden)
    torch.testing.assert_close(logits, expected[9:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("draft", [None, DRAFT_IDS])
def test_many_rows_are_each_row_by_itself(
    llama: BaseModel, conditioned: bool, lm_head: bool, draft: Tensor | None
) -> None:
    heads = heads_of(llama, conditioned=conditioned, lm_head=lm_head, draft=draft)
    torch.manual_seed(5)
    hidden, pending = torch.randn(2, 5, HIDDEN), torch.randint(VOCAB, (2, 5))
    logits = heads.logits(hidden, pending, 2)
    best = heads.propose(hidden, pending, 2, 4)
    assert logits.shape == (2, 2, 5, heads.info.vocabulary)
    assert best.shape == (2, 2, 5, 4)
    for i in range(2):
        for j in range(5):
            alone = heads.logits(hidden[i, j], pending[i, j], 2)
            torch.testing.assert_close(logits[:, i, j], alone)
            assert torch.equal(best[:, i, j], heads.propose(hidden[i, j], pending[i, j], 2, 4))


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("draft", [None, DRAFT_IDS])
def test_ranks_are_those_of_drafting_step_by_step(
    base: BaseModel, conditioned: bool, draft: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, with an ordinary forward for each, gives what the chunks give."""
    monkeypatch.setattr(measuring, "ROWS", 7)
    heads = heads_of(base, conditioned=conditioned, draft=draft, lm_head=not conditioned)
    model = medusa(base, heads)
    (text,) = measure_accuracy(model, [Question("q", "c", "Hello")], 24, PROMPTS).texts
    assert (text.id, text.category, text.turn) == ("q", "c", 0)
    prompt = list(b"Hello")
    answer = model.generate("Hello", limits=Limits(24)).token_ids
    whole = [*prompt, *answer]
    assert text.tokens == len(answer)
    cache = KVCache()
    base.prefill(torch.tensor(prompt[:-1]), cache)
    hits = 0
    for t in range(len(answer) - 1):
        row = base.prefill(torch.tensor([whole[len(prompt) - 1 + t]]), cache).hidden[0]
        best = heads.propose(row, torch.tensor(answer[t]), 3, 64).tolist()
        for k, rank in enumerate(text.ranks[t]):
            true = whole[len(prompt) + t + 1 + k]
            assert rank == (best[k].index(true) if true in best[k] else MISS)
            hits += rank != MISS
        assert len(text.ranks[t]) == min(3, len(answer) - 1 - t)
    assert hits > 0


def test_follow_ups_are_asked_behind_the_models_own_answers(llama: BaseModel) -> None:
    question = Question("q", "", "Hi", ("more", "again"))
    model = medusa(llama, heads_of(llama), CHAT_TEMPLATE)
    texts = measure_accuracy(model, [question], 9, PROMPTS).texts
    assert [text.turn for text in texts] == [0, 1, 2]
    answers: list[str] = []
    for text in texts:
        result = model.generate(question.messages(answers), limits=Limits(9))
        answers.append(result.text)
        alone = Question("alone", "", tuple(question.messages(answers[:-1])))
        (fresh,) = measure_accuracy(model, [alone], 9, PROMPTS).texts
        assert fresh.ranks == text.ranks, "rows kept across turns are those of a fresh prompt"
    plain = medusa(llama, heads_of(llama))
    assert [t.turn for t in measure_accuracy(plain, [question], 9, PROMPTS).texts] == [0]


def test_the_context_limits_answers_and_skips_prompts(llama: BaseModel) -> None:
    questions = [Question(str(n), "", "x" * n) for n in (CONTEXT - 4, CONTEXT, 3)]
    found = measure_accuracy(medusa(llama, heads_of(llama)), questions, 9, PROMPTS)
    assert found.provenance.skipped == (f"{CONTEXT}/1",)
    assert found.provenance.complete
    assert [(text.id, text.tokens, text.limit) for text in found.texts] == [
        (str(CONTEXT - 4), 4, 4),
        ("3", 9, 9),
    ]


def stop_after(steps: int) -> Callable[[], bool]:
    calls = iter(range(10**6))
    return lambda: next(calls) >= steps


def test_an_interruption_keeps_whole_answers(llama: BaseModel) -> None:
    questions = [Question(str(n), "", "Hello") for n in range(3)]
    model = medusa(llama, heads_of(llama))
    whole = measure_accuracy(model, questions, 9, PROMPTS)
    sizes = set()
    for steps in range(40):
        part = measure_accuracy(model, questions, 9, PROMPTS, should_stop=stop_after(steps))
        assert part.texts == whole.texts[: len(part.texts)]
        assert part.provenance.complete == (len(part.texts) == 3)
        assert part.provenance.skipped == ()
        sizes.add(len(part.texts))
    assert sizes == {0, 1, 2, 3}


def test_what_cannot_be_measured_is_refused_before_anything_runs(llama: BaseModel) -> None:
    with pytest.raises(UsageError, match="no heads"):
        measure_accuracy(medusa(llama, None), [], 9, PROMPTS)
    stages: list[Stage] = []
    bad = [Question("1", "", "Hi"), Question("2", "", ({"role": "user", "content": "Hi"},))]
    with pytest.raises(UsageError, match="no chat template"):
        measure_accuracy(medusa(llama, heads_of(llama)), bad, 9, PROMPTS, stages.append)
    assert stages == []


def test_every_prompt_is_reported(llama: BaseModel) -> None:
    stages: list[Stage] = []
    questions = [Question("a", "", "Hi"), Question("b", "", "Ho")]
    measure_accuracy(medusa(llama, heads_of(llama)), questions, 3, PROMPTS, stages.append)
    assert stages == [Stage("prompt 1 of 2: a", 0, 2), Stage("prompt 2 of 2: b", 1, 2)]


def test_the_prompts_digest_is_of_what_is_asked() -> None:
    one, other = Question("1", "c", "Hi", ("x",)), Question("2", "", "Ho")
    digest = prompts_digest([one, other])
    assert len(digest) == 12
    assert prompts_digest([replace(other, id="9"), replace(one, category="")]) == digest
    assert prompts_digest([one, replace(other, first="Hi")]) != digest
    assert prompts_digest([replace(one, follow_ups=()), other]) != digest


class TestWhereResultsLie:
    """Beside the user's own heads, else in the cache folder; never with other heads."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def files(self, folder: Path, **kind: Any) -> HeadsFiles:
        folder.mkdir(exist_ok=True)
        save_file(head_tensors(2, **kind), folder / "medusa_heads.safetensors")
        found = find_heads(folder)
        assert found is not None
        return found

    def results(self, of: Subject, *, complete: bool = True) -> Traces:
        base = tiny_base()
        found = measure_accuracy(
            medusa(base, heads_of(base)), [Question("q", "", "Hi")], 5, PROMPTS
        )
        return replace(
            found,
            provenance=replace(
                found.provenance,
                base=of.base, heads_digest=heads_digest(of.files), complete=complete,
            ),
        )  # fmt: skip

    def test_heads_of_the_users_own_keep_them_beside(self, tmp_path: Path) -> None:
        of = subject(str(tmp_path / "mine"), "some/base", self.files(tmp_path / "mine"))
        assert (of.heads, of.base) == ("mine", "some/base")
        assert results_folder(of) == tmp_path / "mine"
        assert load_traces(of) is None
        found = self.results(of)
        assert save(results_folder(of), found)
        assert load_traces(of) == found
        assert load_accuracy(of) == accuracy_table(found)
        assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
            "accuracy.json",
            "medusa_heads.safetensors",
            "traces.json",
        ]

    @pytest.mark.parametrize("home", ["package", "hub", "cache", "read-only"])
    def test_other_heads_keep_them_in_the_cache(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, home: str
    ) -> None:
        files = self.files(tmp_path / "there")
        if home == "package":
            monkeypatch.setattr(measured, "_PACKAGE", tmp_path / "there")
        elif home == "hub":
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "there"))
        elif home == "cache":
            monkeypatch.setenv("MEDUSA_CACHE", str(cache := tmp_path / "there"))
        else:
            monkeypatch.setattr("os.access", lambda *_: False)
        of = subject("own/heads", "own/base", files)
        assert results_folder(of) == cache / "measured" / "own--heads_on_own--base"
        beside, newer = self.results(of), replace(self.results(of), texts=())
        save(tmp_path / "there", beside)
        assert load_traces(of) == beside, "what came with the heads is read"
        save(results_folder(of), newer)
        assert load_traces(of) == newer, "what the user measured comes first"

    def test_results_of_other_heads_do_not_count(self, tmp_path: Path, cache: Path) -> None:
        of = subject("heads", "base", self.files(tmp_path / "mine"))
        found = self.results(of)
        save(tmp_path / "mine", found)
        said: list[Stage] = []
        self.files(tmp_path / "mine", lm_head=False)
        assert load_traces(of, said.append) is None
        assert load_accuracy(of, said.append) is None
        assert len(said) == 2
        assert "measured with other heads" in said[0].text
        assert str(tmp_path / "mine" / "traces.json") in said[0].text
        self.files(tmp_path / "mine")
        assert load_traces(of) == found
        assert load_traces(replace(of, base="other")) is None
        # An old measurement in the cache does not hide what came with newer heads.
        stale = replace(found, provenance=replace(found.provenance, heads_digest="old"))
        save(cache / "measured" / "heads_on_base", stale)
        assert load_traces(of) == found

    def test_the_digest_is_of_the_tensors(self, tmp_path: Path) -> None:
        """In any kind of file; a single changed weight shows."""
        files = self.files(tmp_path / "mine")
        torch.save(head_tensors(2), tmp_path / "same.pt")
        prefixed = {f"medusa_head.{name}": tensor for name, tensor in head_tensors(2).items()}
        save_file(prefixed | {"other": torch.ones(2)}, tmp_path / "model.safetensors")
        full = find_heads(tmp_path)
        assert full is not None
        digest = heads_digest(files)
        assert digest == heads_digest(HeadsFiles((tmp_path / "same.pt",), "", None))
        assert digest == heads_digest(full)
        changed = head_tensors(2)
        changed["1.0.linear.bias"][3] += 1e-3
        torch.save(changed, tmp_path / "same.pt")
        assert digest != heads_digest(HeadsFiles((tmp_path / "same.pt",), "", None))
        half = {name: tensor.bfloat16() for name, tensor in head_tensors(2).items()}
        save_file(half, tmp_path / "half.safetensors")
        assert digest != heads_digest(HeadsFiles((tmp_path / "half.safetensors",), "", None))

    def test_partial_results_do_not_replace_complete_ones(self, tmp_path: Path) -> None:
        of = subject("heads", "base", self.files(tmp_path / "mine"))
        part = self.results(of, complete=False)
        assert save(tmp_path / "mine", part)
        assert load_traces(of) == part
        whole = self.results(of)
        assert save(tmp_path / "mine", whole)
        assert not save(tmp_path / "mine", part)
        assert load_traces(of) == whole
        (tmp_path / "mine" / "traces.json").write_text("{")
        with pytest.raises(CheckpointError, match="traces.json is damaged"):
            load_traces(of)
        assert save(tmp_path / "mine", part)

    def test_a_folder_that_cannot_be_written_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        of = subject("heads", "base", self.files(tmp_path / "mine"))
        with pytest.raises(StorageError, match="cannot be written"):
            save(tmp_path / "file", self.results(of))

    def test_a_loaded_model_knows_where_its_heads_lie(self, model_folder: Path) -> None:
        model = medusa_cli.load(str(model_folder), offline=True)
        of = measured_subject(model)
        assert of is not None
        assert of == Subject("tiny", "tiny", of.files)
        assert results_folder(of) == model_folder
        found = measure_accuracy(model, [Question("q", "", "Hi")], 5, PROMPTS)
        save(results_folder(of), found)
        assert load_traces(of) == found
        assert measured_subject(medusa(tiny_base(), heads_of(tiny_base()))) is None

    def test_shipped_heads_have_a_plain_name(self, cache: Path, tmp_path: Path) -> None:
        of = subject("builtin:smollm2-135m", "smollm2-135m", self.files(tmp_path / "mine"))
        assert of.heads == "smollm2-135m"
        assert measured._in_cache(of) == cache / "measured" / "smollm2-135m"

    def test_the_configs_accuracy_is_cut_to_the_heads(self, tmp_path: Path) -> None:
        self.files(tmp_path / "mine")
        rows = [[0.5, 0.25], [0.25], [0.1]]
        config = tmp_path / "mine" / "config.json"
        config.write_text(json.dumps({"accuracy": {"rank_accuracy": rows}}))
        of = subject("heads", "base", self.files(tmp_path / "mine"))
        assert config_accuracy(of) == ((0.5, 0.25), (0.25,))
        config.write_text(json.dumps({"accuracy": {"rank_accuracy": [["x"]]}}))
        with pytest.raises(CheckpointError, match="rank_accuracy"):
            config_accuracy(of)
        config.write_text("{}")
        assert config_accuracy(of) == ()
