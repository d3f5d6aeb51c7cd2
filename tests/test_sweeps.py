"""Laws of the sweeps: step costs, dense trees, and how far typical acceptance moves the text."""

import math
from pathlib import Path

import pytest
import torch

from conftest import VOCAB, ScriptedDrafter, tiny_base
from medusa_cli.bench.benchmark import reads_like_noise
from medusa_cli.bench.runner import Run
from medusa_cli.bench.sweep_nodes import best_dense
from medusa_cli.bench.sweep_temperature import mean_divergence
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.step_cost import (
    StepCosts,
    costs_of,
    load_costs,
    measure_step_seconds,
    save_costs,
)
from medusa_cli.decoding.traces import Provenance, TextTrace, Traces
from medusa_cli.decoding.tree import ROOT_ONLY, dense_tree
from medusa_cli.decoding.tree_search import expected_from_traces
from medusa_cli.errors import CheckpointError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache

COSTS = StepCosts("tiny", "cpu", "float32", 1, 256, {1: 1.0, 4: 4.0, 8: 4.0})


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 4), (16, 8)])
def test_costs_between_and_beyond_the_measured_counts(nodes: int, seconds: float) -> None:
    assert COSTS.at(nodes) == pytest.approx(seconds)


def test_costs_are_kept_for_the_same_model_and_machine(llama: BaseModel) -> None:
    assert load_costs(llama) is None
    kept = save_costs(costs_of(llama, {1: 0.5, 8: 0.75}))
    found = load_costs(llama)
    assert found is not None
    assert found.seconds == {1: 0.5, 8: 0.75}
    for damage in ("", "{}", "[]", '{"format": "medusa-step-cost/1", "seconds": {"1": -1}}'):
        kept.write_text(damage)
        with pytest.raises(CheckpointError, match="measure again"):
            load_costs(llama)


def test_costs_of_another_precision_do_not_count(llama: BaseModel) -> None:
    save_costs(costs_of(llama, {1: 0.5}))
    half = BaseModel(tiny_base().module.to(torch.bfloat16))
    assert load_costs(half) is None


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
