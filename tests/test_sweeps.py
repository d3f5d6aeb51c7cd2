"""Laws of the sweeps: step costs, dense trees, and how far typical acceptance moves the text."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import VOCAB, ScriptedDrafter, tiny_base
from medusa_cli.bench.benchmark import reads_like_noise
from medusa_cli.bench.runner import Run
from medusa_cli.bench.sweep_nodes import best_dense
from medusa_cli.bench.sweep_temperature import mean_divergence
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.auto_tree import step_costs
from medusa_cli.decoding.step_cost import CostKey, StepCosts, cost_key, load_costs, save_costs
from medusa_cli.decoding.step_timing import (
    FAR_NODES,
    TABLE_NODES,
    measure_costs,
    measure_step_seconds,
)
from medusa_cli.decoding.traces import Provenance, TextTrace, Traces
from medusa_cli.decoding.tree import ROOT_ONLY, dense_tree
from medusa_cli.decoding.tree_search import expected_from_traces
from medusa_cli.errors import CheckpointError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.heads import HeadKind, HeadsInfo
from medusa_cli.models.progress import Stage
from test_accuracy import heads_of

HEADS = HeadsInfo("heads", HeadKind.MEDUSA, 3, 1, VOCAB)
KEY = CostKey("tiny", "heads", "cpu", "float32", "torch", 1)
COSTS = StepCosts(KEY, {1: 1.0, 4: 4.0, 8: 4.0}, (0.1, 0.2))


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 4), (16, 8)])
def test_costs_between_and_beyond_the_measured_counts(nodes: int, seconds: float) -> None:
    assert COSTS.at(nodes) == pytest.approx(seconds)


def test_costs_of_disturbed_steps_do_not_count() -> None:
    costs = StepCosts(KEY, {1: 1.0, 2: 9.0, 4: 1.5, 8: 3.0}, ())
    assert costs.up_to(5) == pytest.approx([0.0, 1.0, 1.5, 1.5, 1.5, 1.875])
    assert costs.drafting(3) == 0


def test_costs_grow_with_the_context() -> None:
    costs = StepCosts(KEY, {1: 1.0, 8: 2.0}, (), context=64, growth={1: 0.001, 8: 0.004})
    assert costs.at(1, 64) == costs.at(1) == costs.at(1, 3) == 1.0
    assert costs.at(1, 1064) == pytest.approx(2.0)
    assert costs.at(8, 1064) == pytest.approx(6.0)
    assert costs.up_to(2, 1064)[2] == pytest.approx(8 / 7 + 1000 * (0.001 + 0.003 / 7))


def test_the_cost_of_drafting() -> None:
    assert [COSTS.drafting(heads) for heads in range(4)] == [0.0, 0.1, 0.2, 0.2]


def test_costs_are_kept_for_the_same_model_and_machine(llama: BaseModel) -> None:
    key = cost_key(llama, HEADS)
    assert load_costs(key) is None
    costs = StepCosts(key, {1: 0.5, 8: 0.75}, (0.1,), context=64, growth={1: 0.001})
    kept = save_costs(costs)
    assert load_costs(key) == costs
    falling = json.loads(kept.read_text()) | {"growth": {"1": -0.001}}
    for damage in ("", "{}", "[]", '{"format": "medusa-step-cost/3"}', json.dumps(falling)):
        kept.write_text(damage)
        with pytest.raises(CheckpointError, match="measure again"):
            load_costs(key)


def test_costs_of_another_precision_or_of_other_heads_do_not_count(llama: BaseModel) -> None:
    save_costs(StepCosts(cost_key(llama, HEADS), {1: 0.5}, ()))
    half = BaseModel(tiny_base().module.to(torch.bfloat16))
    assert load_costs(cost_key(half, HEADS)) is None
    assert load_costs(cost_key(llama, replace(HEADS, name="others"))) is None


def test_a_table_is_measured_once_and_kept(llama: BaseModel) -> None:
    heads = heads_of(llama)
    stages: list[Stage] = []
    costs = step_costs(llama, heads, stages.append)
    assert sorted(costs.verify) == sorted(TABLE_NODES)
    assert sorted(costs.growth) == sorted(FAR_NODES)
    assert min(costs.growth.values()) >= 0
    assert len(costs.draft) == 3
    assert "once" in stages[0].text
    stages.clear()
    assert step_costs(llama, heads, stages.append) == costs
    assert stages == [], "the kept table is read without a word"
    save_costs(costs).write_text("damage")
    assert sorted(step_costs(llama, heads).verify) == sorted(TABLE_NODES), "and replaced if broken"


@pytest.mark.parametrize(("seconds", "counts"), [(0.001, 12), (1.0, 3), (60.0, 3)])
def test_a_slow_model_is_timed_on_fewer_counts(
    llama: BaseModel, seconds: float, counts: int
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    costs = measure_costs(llama, heads_of(llama), 3, 4, KEY, clock)
    assert len(costs.verify) == counts
    assert {1, 8, 32} <= set(costs.verify)
    assert [costs.verify[8], costs.draft[0]] == pytest.approx([seconds, seconds])


def test_steps_are_timed_without_the_first_round(llama: BaseModel) -> None:
    """On this clock a step of the first round takes 100 s, any later one 0.25 s."""
    rounds: list[str] = []
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 100.0 if len(rounds) == 1 else 0.25
        return now

    trees = {"plain": ROOT_ONLY, "wide": dense_tree("wide", [3, 2])}
    drafter = ScriptedDrafter(KVCache(), [], None)
    seconds = measure_step_seconds(llama, drafter, trees, rounds.append, clock, rounds=1, context=8)
    assert seconds == pytest.approx({"plain": 0.25, "wide": 0.25})
    assert len(rounds) == 2, "a warm-up and one round"


def test_an_interrupt_ends_the_timing_with_the_rounds_made(llama: BaseModel) -> None:
    rounds: list[str] = []
    seconds = measure_step_seconds(
        llama, None, {"plain": ROOT_ONLY}, rounds.append, should_stop=lambda: True, context=8
    )
    assert seconds["plain"] > 0
    assert len(rounds) == 2, "the warm-up and the first counted round"


def test_the_best_dense_tree_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-1, 4, (60, 2), generator=generator).tolist()
    found = Traces(
        Provenance("heads", "base", "", "made up", "0", 9),
        2,
        tuple(
            TextTrace(str(i), "", 0, False, 3, (tuple(row), tuple(row[:1])))
            for i, row in enumerate(rows)
        ),
    )
    for nodes in (2, 3, 5, 8, 13):
        every = [dense_tree("d", [a]) for a in range(1, nodes)]
        every += [
            dense_tree("d", [a, b])
            for a in range(1, nodes)
            for b in range(1, nodes)
            if 1 + a + a * b <= nodes
        ]
        best = max(expected_from_traces(tree, found) for tree in every)
        chosen = best_dense(found, nodes)
        assert chosen.nodes <= nodes
        assert expected_from_traces(chosen, found) == pytest.approx(best)


def run_of(prompt: list[int], tokens: list[int], lengths: list[int]) -> Run:
    return Run("typical", "q", "", 0, 0, 0, tuple(prompt), tuple(tokens), 1, tuple(lengths),
               (1.0,) * len(lengths), 1.0, 1, False)  # fmt: skip


@pytest.mark.parametrize("greedy_root", [False, True])
def test_divergence_against_hand_written_sums(llama: BaseModel, greedy_root: bool) -> None:
    sampling = SamplingConfig(
        temperature=0.8, acceptance=Acceptance.TYPICAL, seed=0, greedy_root=greedy_root
    )
    prompt, tokens = [5, 6, 7], [10, 20, 30, 40, 50, 60]
    # The prefill's token, a step of two drafts and a base token, a step of a base token, then a
    # step of one draft whose base token was cut.
    drafted = [False, True, True, False, False, True]
    run = run_of(prompt, tokens, [3, 1, 2])
    with torch.inference_mode():
        logits = llama.module(torch.tensor([prompt + tokens])).logits[0]
    expected = 0.0
    for i, token in enumerate(tokens):
        p = (logits[len(prompt) + i - 1] / 0.8).softmax(-1)
        if drafted[i] or greedy_root:
            expected -= math.log(p[token])
        else:
            entropy = -float((p * p.log()).sum())
            threshold = min(sampling.epsilon, sampling.delta * math.exp(-entropy))
            expected -= math.log(float(p[p > threshold].sum()))
    assert mean_divergence(llama, [run], sampling) == pytest.approx(expected / 6, rel=1e-4)


def test_nothing_moved_nothing_measured(llama: BaseModel) -> None:
    sampling = SamplingConfig(temperature=1.0, acceptance=Acceptance.TYPICAL, epsilon=1e-9, seed=0)
    assert mean_divergence(llama, [run_of([1], [2, 3], [1])], sampling) < 1e-3
    assert mean_divergence(llama, [], sampling) == 0


def test_noise_is_told_from_text(llama: BaseModel) -> None:
    """The model's own greedy text is likely to it; random tokens are not."""
    ids = [1]
    with torch.inference_mode():
        for _ in range(40):
            ids.append(int(llama.module(torch.tensor([ids])).logits[0, -1].argmax()))
    noise = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    assert not reads_like_noise(llama, ids)
    assert reads_like_noise(llama, noise)
    assert not reads_like_noise(llama, [1]), "one token tells nothing"
