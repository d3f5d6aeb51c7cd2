"""Calibration: fits find what made the truth, and what is kept replays what decoding does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import medusa_cli
from conftest import head_tensors, tiny_base
from medusa_cli.config import Limits, SamplingConfig
from medusa_cli.decoding import calibration, scores
from medusa_cli.decoding.adaptive import CANDIDATES, AutoTree
from medusa_cli.decoding.calibration import Calibration, HeadCalibration, uncalibrated
from medusa_cli.decoding.expansion import Expansion
from medusa_cli.decoding.lookup import Guess
from medusa_cli.decoding.measured import load_calibration, load_scored_traces, save
from medusa_cli.decoding.scores import (
    Scores,
    at_least,
    from_bytes,
    replay_adaptive,
    threshold_for,
    to_bytes,
)
from medusa_cli.decoding.traces import Provenance, TextTrace, Traces, replay
from medusa_cli.decoding.tree import Tree, load_tree
from medusa_cli.errors import CheckpointError
from medusa_cli.models.cache import KVCache
from medusa_cli.models.progress import Stage
from medusa_cli.text.prompt_files import Question
from medusa_cli.training import accuracy as measuring
from medusa_cli.training.accuracy import PromptSet, measure_heads, measured_subject
from medusa_cli.training.calibrating import (
    SAMPLING_TEMPERATURES,
    TEMPERATURES,
    Evidence,
    evidence_of,
    fit,
    joined,
    log_probs,
    loss,
)
from test_accuracy import heads_of, medusa

PROMPTS = PromptSet("test", "0123456789ab")
PROVENANCE = Provenance("heads", "base", "d", "made up", "0", 40)
VALUES = (0.0, 0.7, 1.0)


def drawn(logits: Tensor, temperature: float, seed: int) -> Tensor:
    """A token of each row of logits [..., V'] at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    shares = (logits / temperature).softmax(dim=-1)
    flat = shares.flatten(end_dim=-2).multinomial(1, generator=generator)
    return flat.view(logits.shape[:-1])


def made_up(heads: int, rows: int, vocabulary: int = 50, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.5 * torch.randn(heads, rows, vocabulary, generator=generator)


def uniform_base(rows: int, vocabulary: int) -> Tensor:
    return torch.zeros(rows, vocabulary)


@pytest.mark.parametrize("true", [TEMPERATURES[3], TEMPERATURES[7], TEMPERATURES[14]])
def test_the_temperature_that_made_the_truth_is_found(true: float) -> None:
    logits = made_up(1, 6000)
    truth = drawn(logits, true, seed=1)
    found = fit(evidence_of(logits, uniform_base(6001, 50), truth, None)).points[0]
    assert found.temperatures[0] == pytest.approx(true, rel=0.11)
    assert found.coverages == (1.0,)


def test_coverage_is_the_share_of_truths_in_the_draft_vocabulary() -> None:
    logits, ids = made_up(1, 4000, 20), torch.arange(20) * 3
    true = torch.where(torch.rand(1, 4000, generator=torch.Generator().manual_seed(3)) < 0.75,
                       ids[drawn(logits, 1.0, seed=2)], torch.tensor(1))  # fmt: skip
    found = fit(evidence_of(logits, uniform_base(4001, 60), true, ids)).points
    assert found[0].coverages[0] == pytest.approx(0.75, abs=0.02)
    assert found[0].temperatures[0] == pytest.approx(1.0, rel=0.11)
    assert found[2].coverages[0] == pytest.approx(20 / 60, abs=1e-4), "of a uniform base model"


def test_positions_count_as_much_as_decoding_looks_there() -> None:
    """Head 2 is right about itself where head 1 was right, and much too sure elsewhere."""
    rows = 6000
    logits = made_up(2, rows)
    first = drawn(logits[0], 1.0, seed=1)
    sure = logits[0].softmax(-1).gather(1, first[:, None])[:, 0] > 0.2
    second = torch.where(sure, drawn(logits[1], 1.0, seed=2), drawn(logits[1], 3.0, seed=3))
    evidence = evidence_of(logits, uniform_base(rows + 2, 50), torch.stack([first, second]), None)
    assert fit(evidence).points[0].temperatures[1] == pytest.approx(1.0, rel=0.25)
    alone = evidence_of(logits[1:], uniform_base(rows + 1, 50), second[None], None)
    assert fit(alone).points[0].temperatures[0] > 1.5, "had every position counted the same"


def test_positions_without_weight_are_left_out() -> None:
    logits = made_up(1, 4000)
    truth = drawn(logits, 2.0, seed=1)
    good = evidence_of(logits, uniform_base(4001, 50), truth, None)
    loop = evidence_of(logits, uniform_base(4001, 50), logits.argmax(-1), None, weight=0.0)
    assert fit(joined([good, loop])) == fit(good)
    assert fit(loop).points[0].temperatures[0] == TEMPERATURES[0], "better than nothing"


def test_fitted_temperatures_lose_least() -> None:
    logits = made_up(2, 500)
    truth = torch.stack([drawn(logits[0], 1.7, seed=1), drawn(logits[1], 0.7, seed=2)])
    evidence = evidence_of(logits, made_up(1, 502, seed=5)[0], truth, None)
    for point in fit(evidence).points:
        best = loss(evidence, point)
        for k in range(2):
            for other in TEMPERATURES:
                changed = list(point.temperatures)
                changed[k] = other
                tried = loss(evidence, replace(point, temperatures=tuple(changed)))
                assert tried[k] >= best[k] - 1e-6


def test_sampled_truth_is_the_base_models_distribution() -> None:
    logits, base = made_up(2, 5, 20), made_up(1, 7, 60, seed=4)[0]
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:20]
    truth = torch.randint(60, (2, 5), generator=torch.Generator().manual_seed(2))
    evidence = evidence_of(logits, base, truth, ids)
    assert evidence.covered.shape == evidence.stated.shape == (5, 2, len(SAMPLING_TEMPERATURES))
    for s, temperature in enumerate(SAMPLING_TEMPERATURES):
        for r in range(5):
            for k in range(2):
                if temperature == 0:
                    p = torch.nn.functional.one_hot(truth[k, r], 60).float()
                else:
                    p = (base[r + k + 1] / temperature).softmax(-1)
                covered = float(p[ids].sum())
                assert float(evidence.covered[r, k, s]) == pytest.approx(covered, abs=1e-6)
                stated = float((p[ids] * logits[k, r]).sum())
                assert float(evidence.stated[r, k, s]) == pytest.approx(stated, abs=1e-5)


def test_kept_log_probabilities_are_those_of_drafting() -> None:
    base = tiny_base()
    heads = heads_of(base)
    model = medusa(base, heads)
    found = measure_heads(model, [Question("q", "c", "Hello")], 24, PROMPTS)
    assert found.evidence is not None
    point = fit(found.evidence).points[0]
    kept = log_probs(found.evidence, fit(found.evidence))
    ids = [*model.encode("Hello"), *model.generate("Hello", limits=Limits(24)).token_ids]
    start = len(model.encode("Hello"))
    hidden = base.extend(torch.tensor(ids), KVCache()).hidden
    for t in range(found.traces.positions):
        pending = torch.tensor(ids[start + t])
        said = heads.score(hidden[start + t - 1], pending, point.temperatures, CANDIDATES)
        expected = said.log_probs + torch.tensor(point.coverages).log()[:, None]
        torch.testing.assert_close(kept[t], expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("rows", [4, 7, 100])
def test_evidence_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    model = medusa(tiny_base(), heads_of(tiny_base(), conditioned=True))
    question = Question("q", "c", "Hello")
    whole = measure_heads(model, [question], 30, PROMPTS)
    monkeypatch.setattr(measuring, "ROWS", rows)
    parts = measure_heads(model, [question], 30, PROMPTS)
    assert parts.traces == whole.traces
    assert parts.evidence is not None
    assert whole.evidence is not None
    for name in Evidence.__dataclass_fields__:
        found, expected = getattr(parts.evidence, name), getattr(whole.evidence, name)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert whole.evidence.known[: 29 - 3].all()


def random_traces(heads: int = 3, rows: int = 60, seed: int = 0) -> tuple[Traces, Scores]:
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(-1, 5, (rows, heads), generator=generator).tolist()
    texts = tuple(
        TextTrace(f"{n}", "", 0, False, rows + 1,
                  tuple(tuple(row[: rows - t]) for t, row in enumerate(ranks)))
        for n in range(2)
    )  # fmt: skip
    stated = torch.randn(2 * rows, heads, 16, generator=generator).sort(dim=-1, descending=True)
    return Traces(PROVENANCE, heads, texts), Scores(stated.values.log_softmax(dim=-1))


def always(tree: Tree) -> scores.Grower:
    """The same tree whatever the heads say."""

    def grower(_heads: Sequence[Sequence[Guess]], room: int) -> Expansion:
        grown = Expansion([0])
        number = {(): 0}
        for choice in tree.limited(room).choices:
            number[choice] = grown.nodes
            grown.tokens.append(choice[-1])
            grown.parents.append(number[choice[:-1]])
            grown.depths.append(len(choice))
        return grown

    return grower


@pytest.mark.parametrize("name", ["mc_sim_7b_7", "mc_sim_7b_63"])
def test_a_tree_that_does_not_adapt_replays_as_the_static_one(name: str) -> None:
    traces, said = random_traces()
    tree = load_tree(name).limited(3)
    expected = [n for text in traces.texts for n in replay(tree, text)]
    assert [s.accept_length for s in replay_adaptive(traces, said, always(tree))] == expected


def test_a_lower_threshold_has_more_nodes() -> None:
    traces, said = random_traces()
    before = 0.0
    for asked in (1.5, 4, 16, 64):
        share = threshold_for(traces, said, asked)
        steps = list(replay_adaptive(traces, said, at_least(share)))
        mean = sum(step.nodes for step in steps) / len(steps)
        assert 0.85 * asked <= mean <= asked
        assert mean > before
        before = mean
    root = list(replay_adaptive(traces, said, at_least(1.1)))
    assert {(step.nodes, step.depth, step.accept_length) for step in root} == {(1, 0, 1)}


def test_scores_survive_a_file() -> None:
    traces, said = random_traces()
    read = from_bytes(to_bytes(said), traces, "file")
    torch.testing.assert_close(read.log_probs, said.log_probs, atol=1 / 31, rtol=0)
    other, _ = random_traces(rows=50)
    with pytest.raises(CheckpointError, match="other traces"):
        from_bytes(to_bytes(said), other, "file")
    with pytest.raises(CheckpointError, match="damaged"):
        from_bytes(b"nonsense", traces, "file")


def test_calibrations_between_measured_temperatures() -> None:
    found = Calibration(
        tuple(HeadCalibration(at, (1 + at, 2.0), (0.5, 1 - at / 2)) for at in VALUES)
    )
    assert found.at(0.0) == found.points[0]
    assert found.at(5.0) == found.points[-1]
    middle = found.at(0.35)
    assert middle.temperatures == pytest.approx((1.35, 2.0))
    assert middle.coverages == pytest.approx((0.5, 0.825))
    assert uncalibrated(3).at(0.9).temperatures == (1.0, 1.0, 1.0)


def test_a_calibration_survives_a_file() -> None:
    found = Calibration(tuple(HeadCalibration(at, (1 + at,), (0.5,)) for at in VALUES))
    text = calibration.to_json(found, PROVENANCE)
    kept = calibration.from_json(text, "file")
    assert (kept.calibration, kept.provenance) == (found, PROVENANCE)
    for old, new in (
        ('"medusa-calibration/1"', '"other"'),
        ("0.5", "1.5"),
        ('"coverages"', '"covers"'),
        ('"sampling_temperature": 0.7', '"sampling_temperature": 2.0'),
        ('"provenance"', '"origin"'),
    ):
        assert old in text
        with pytest.raises(CheckpointError, match="damaged"):
            calibration.from_json(text.replace(old, new), "file")


@pytest.fixture
def measured_folder(model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tiny model whose heads are measured and calibrated."""
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    model = medusa_cli.load(str(model_folder), offline=True)
    found = measure_heads(model, [Question("q", "c", "Hello")], 20, PROMPTS)
    assert save(model_folder, found.traces, found.calibrated())
    return model_folder


def test_calibrated_heads_draft_an_adaptive_tree(measured_folder: Path) -> None:
    stages: list[Stage] = []
    model = medusa_cli.load(str(measured_folder), offline=True, report=stages.append)
    assert isinstance(model.tree, AutoTree)
    assert any("what steps cost" in stage.text for stage in stages)
    of = measured_subject(model)
    assert of is not None
    assert model.tree.calibration == load_calibration(of)
    limits = Limits(30, ignore_eos=True)
    plain = medusa_cli.load(str(measured_folder), plain=True, offline=True)
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.9, seed=3)):
        expected = plain.generate("Hello", limits=limits, sampling=sampling).token_ids
        for lookup in (None, False, True):
            used = replace(model, lookup=lookup)
            result = used.generate("Hello", limits=limits, sampling=sampling)
            assert result.token_ids == expected
            assert len(result.step_nodes) == len(result.accept_lengths)
    named = medusa_cli.load(str(measured_folder), tree="mc_sim_7b_7", offline=True)
    assert named.tree == load_tree("mc_sim_7b_7")
    assert named.with_tree("auto").tree == model.tree


def test_scores_are_kept_beside_their_traces(measured_folder: Path) -> None:
    model = medusa_cli.load(str(measured_folder), tree="mc_sim_7b_7", offline=True)
    of = measured_subject(model)
    assert of is not None
    kept = load_scored_traces(of)
    assert kept is not None
    assert kept.scores is not None
    assert len(kept.scores.log_probs) == kept.traces.positions
    assert save(measured_folder, kept.traces), "measured without scores"
    again = load_scored_traces(of)
    assert again is not None
    assert again.scores is None


def test_another_heads_calibration_does_not_count(measured_folder: Path) -> None:
    from safetensors.torch import save_file

    others = {name: tensor + 1 for name, tensor in head_tensors(4).items()}
    save_file(others, measured_folder / "medusa_lm_head.safetensors")
    stages: list[Stage] = []
    model = medusa_cli.load(str(measured_folder), offline=True, report=stages.append)
    assert not isinstance(model.tree, AutoTree)
    assert any("other heads" in stage.text for stage in stages)
    stages.clear()
    auto = medusa_cli.load(
        str(measured_folder), tree="auto", offline=True, report=stages.append
    ).tree
    assert isinstance(auto, AutoTree)
    assert auto.calibration == uncalibrated(4)
    assert any("medusa accuracy" in stage.text for stage in stages)
