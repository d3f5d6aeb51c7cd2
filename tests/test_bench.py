"""Laws of the benchmark's machinery, on made-up clocks, decoders and amounts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from medusa_cli.bench.arms import PLAIN, Arm, ArmInfo, ArmKind, OnStep
from medusa_cli.bench.comparison import ArmChange, Comparison
from medusa_cli.bench.comparison import tables as comparison_tables
from medusa_cli.bench.equality import compare, first_difference
from medusa_cli.bench.honesty import Conditions, break_even, warnings
from medusa_cli.bench.node_counts import NodeCounts
from medusa_cli.bench.node_tables import nodes_tables
from medusa_cli.bench.runner import Conversation, Measurement, Plan, Run, Runner
from medusa_cli.bench.statistics import Amount, outliers, rate_ratio, ratio_change
from medusa_cli.bench.summary import ArmSummary, summarise
from medusa_cli.bench.tables import Table, to_csv, to_markdown, to_text
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.tree import static_tree
from medusa_cli.text.loops import loop_period
from medusa_cli.text.prompt_files import Question

GREEDY = SamplingConfig(seed=1)
TREE = static_tree("tree", [[0], [0, 0]])


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """As many bytes as there were samples since the reset."""

    def __init__(self) -> None:
        self.samples = 0

    def reset(self) -> None:
        self.samples = 0

    def sample(self) -> None:
        self.samples += 1

    def peak(self) -> int:
        return self.samples


@dataclass
class FakeArm:
    """Emits the numbers from 100 on, `per_step` a step, each step taking `seconds`."""

    info: ArmInfo
    clock: Clock
    per_step: int
    seconds: Callable[[Sequence[int]], float]
    log: list[str] = field(default_factory=list)
    tokens: Callable[[int], int] = lambda i: 100 + i
    fails_at: int | None = None
    nodes: Callable[[int], int] = lambda _emitted: 0

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int, on_step: OnStep) -> None:
        self.log.append(self.info.name)
        self.clock.now += 1.0  # the prefill
        on_step([self.tokens(0)], 0)
        emitted = 1
        while emitted < max_new_tokens:
            if self.fails_at is not None and emitted >= self.fails_at:
                raise RuntimeError("no luck\nwith details")
            count = min(self.per_step, max_new_tokens - emitted)
            self.clock.now += self.seconds(prompt_ids)
            accept = count if self.info.kind is ArmKind.MEDUSA else 1
            new = [self.tokens(emitted + i) for i in range(count)]
            on_step(new, accept, self.nodes(emitted))
            emitted += count


def info(name: str, kind: ArmKind = ArmKind.MEDUSA) -> ArmInfo:
    return ArmInfo(name, kind, "", GREEDY, TREE if kind is ArmKind.MEDUSA else None)


def questions(count: int, *, follow_ups: int = 0) -> list[Question]:
    later = tuple(f"turn {i}" for i in range(follow_ups))
    return [Question(f"q{i}", "even" if i % 2 == 0 else "odd", "x" * (i + 1), later)
            for i in range(count)]  # fmt: skip


def conversation(context: int | None = None) -> Conversation:
    def encode(question: Question, answers: Sequence[str]) -> list[int]:
        return [len(str(question.first)), *map(len, answers)]

    return Conversation(
        encode, lambda ids: "a" * len(ids), lambda q: 1 + len(q.follow_ups), context
    )


def measured(
    arms: Sequence[FakeArm], asked: Sequence[Question], plan: Plan, context: int | None = None
) -> Measurement:
    found = Measurement()
    clock = arms[0].clock
    Runner(arms, conversation(context), plan, lambda _run: None, Memory(), clock).run(asked, found)
    return found


def two_arms(log: list[str]) -> list[FakeArm]:
    """Plain decoding at 1 token a second; a tree with 2 tokens a step of 1.6 seconds."""
    clock = Clock()
    return [
        FakeArm(info(PLAIN, ArmKind.PLAIN), clock, 1, lambda _ids: 1.0, log),
        FakeArm(info("tree"), clock, 2, lambda _ids: 1.6, log),
    ]


def no_gap(_run: Run, _index: int) -> float | None:
    return None


def summaries(arms: Sequence[Arm], found: Measurement) -> list[ArmSummary]:
    return summarise([arm.info for arm in arms], found.runs, no_gap, seed=0)


def test_arms_take_turns_in_abba_order() -> None:
    log: list[str] = []
    found = measured(two_arms(log), questions(4), Plan(max_new_tokens=3, warmup=0))
    assert log == [PLAIN, "tree", "tree", PLAIN, PLAIN, "tree", "tree", PLAIN]
    assert [run.order for run in found.runs] == list(range(8))
    assert found.complete


def test_repeats_of_a_prompt_alternate_too() -> None:
    log: list[str] = []
    measured(two_arms(log), questions(1), Plan(max_new_tokens=3, warmup=0, repeats=2))
    assert log == [PLAIN, "tree", "tree", PLAIN]


def test_warm_up_is_short_untimed_and_on_the_longest_prompt() -> None:
    log: list[str] = []
    arms = two_arms(log)
    prompts: list[int] = []
    arms[0].seconds = lambda ids: prompts.append(ids[0]) or 1.0  # type: ignore[func-returns-value]
    found = Measurement()
    padded = replace(conversation(), encode=lambda q, _answers: [len(q.first)] * len(q.first))
    plan = Plan(max_new_tokens=50, warmup=2)
    runner = Runner(arms, padded, plan, lambda _run: None, Memory(), arms[0].clock)
    runner.run(questions(3), found)
    assert log[:4] == [PLAIN, PLAIN, "tree", "tree"]
    assert set(prompts[:16]) == {3}, "eight steps of each warm-up, on the longest prompt"
    assert prompts[16] == 1
    assert len(found.runs) == 6


def test_known_times_give_known_figures() -> None:
    arms = two_arms([])
    plain, tree = summaries(arms, measured(arms, questions(6), Plan(max_new_tokens=17)))
    assert plain.tokens_per_second == pytest.approx(1.0)
    assert tree.tokens_per_second == pytest.approx(2 / 1.6)
    assert tree.speedup is not None
    assert tree.speedup.value == pytest.approx(1.25)
    # Every question has the same ratio: nothing is left to chance.
    assert (tree.speedup.low, tree.speedup.high) == pytest.approx((1.25, 1.25))
    assert tree.step_ratio == pytest.approx(1.6)
    assert tree.mean_accept_length == 2
    assert tree.pays is True
    assert plain.ttft_seconds == pytest.approx(1.0)
    assert plain.prefill_tokens_per_second == pytest.approx(1.0)
    assert tree.peak_bytes == 9, "the fake meter counts steps"
    assert tree.accepted_by_depth == (1.0,)
    assert "it pays" in str(break_even(tree))


def test_tokens_are_the_sum_of_accept_lengths() -> None:
    arms = two_arms([])
    for run in measured(arms, questions(3), Plan(max_new_tokens=16)).runs:
        assert len(run.token_ids) == 16
        assert len(run.token_ids) - 1 == sum(run.accept_lengths)


def test_time_of_the_listener_is_not_the_arms() -> None:
    arms = two_arms([])
    clock = arms[0].clock
    found = Measurement()

    class SlowMemory(Memory):
        def sample(self) -> None:
            clock.now += 100

    runner = Runner(
        arms, conversation(), Plan(max_new_tokens=4), lambda _run: None, SlowMemory(), clock
    )
    runner.run(questions(1), found)
    assert found.runs[0].step_seconds == pytest.approx((1.0, 1.0, 1.0))


def test_an_arm_that_fails_is_reported_and_the_others_go_on() -> None:
    arms = two_arms([])
    arms[1].fails_at = 12  # behind the warm-up's steps
    found = measured(arms, questions(3), Plan(max_new_tokens=30))
    assert [(arm.name, arm.reason) for arm in found.unavailable] == [("tree", "failed: no luck")]
    assert [run.arm for run in found.runs] == [PLAIN] * 3
    assert found.complete


def test_an_arm_that_cannot_start_fails_in_its_warm_up() -> None:
    arms = two_arms([])
    arms[1].fails_at = 0
    found = measured(arms, questions(2), Plan(max_new_tokens=30))
    assert [arm.name for arm in found.unavailable] == ["tree"]
    assert arms[1].log.count("tree") == 1, "it is not tried again"


def test_later_turns_follow_the_first_arms_answers() -> None:
    arms = two_arms([])
    found = measured(arms, questions(1, follow_ups=2), Plan(max_new_tokens=5))
    prompts = {(run.turn, run.prompt_ids) for run in found.runs}
    assert prompts == {(0, (1,)), (1, (1, 5)), (2, (1, 5, 5))}


def test_what_does_not_fit_the_context_is_left_out_and_said() -> None:
    arms = two_arms([])
    asked = questions(3, follow_ups=1)
    found = measured(arms, asked, Plan(max_new_tokens=5), context=2)
    assert {run.turn for run in found.runs} == {0}
    assert {len(run.token_ids) for run in found.runs} == {1}
    assert found.skipped == ["q0/2", "q1/2", "q2/2"]
    said = warnings(summaries(arms, found), found.runs, Conditions(0.0, skipped=found.skipped))
    assert any("3 prompts do not fit" in line for line in said)


def test_an_interrupt_leaves_what_was_measured() -> None:
    arms = two_arms([])
    found = Measurement()
    runner = Runner(
        arms,
        conversation(),
        Plan(max_new_tokens=5, warmup=0),
        lambda _run: None,
        Memory(),
        arms[0].clock,
        should_stop=lambda: len(found.runs) == 4,
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run(questions(4), found)
    assert len(found.runs) == 4, "the run that was begun does not count"
    assert not found.complete
    said = warnings(summaries(arms, found), found.runs, Conditions(0.0, complete=False))
    assert said[0].startswith("partial")


def test_an_interrupt_counts_during_the_warm_up_too() -> None:
    arms = two_arms([])
    found = Measurement()
    runner = Runner(
        arms,
        conversation(),
        Plan(max_new_tokens=5),
        lambda _run: None,
        Memory(),
        arms[0].clock,
        should_stop=lambda: True,
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run(questions(4), found)
    assert arms[0].log == [PLAIN]


def test_a_bootstrap_interval_is_the_known_one() -> None:
    # Two questions, ratios 1 and 3, equal plain times: resampling draws (1,1), (1,3), (3,3) with
    # shares 1/4, 1/2, 1/4, so the 95% interval runs from the smallest to the greatest.
    pairs = [(Amount(10, 10.0), Amount(10, 10.0)), (Amount(30, 10.0), Amount(10, 10.0))]
    interval = rate_ratio(pairs, seed=0)
    assert interval is not None
    assert interval.value == pytest.approx(2.0)
    assert (interval.low, interval.high) == pytest.approx((1.0, 3.0))
    assert interval.includes_one
    assert str(interval) == "2.00x [1.00, 3.00]"


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        noise = generator.lognormal(0.0, 0.2, size=40)
        pairs = [(Amount(100, 50.0 / n), Amount(100, 100.0)) for n in noise]
        interval = rate_ratio(pairs, seed=trial)
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        # The pooled ratio of the population: tokens over the mean of the times.
        truth = 100.0 / (50.0 * np.exp(0.2**2 / 2))
        hits += interval.low <= truth <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_one_question_has_no_interval_and_none_has_no_ratio() -> None:
    one = rate_ratio([(Amount(10, 5.0), Amount(10, 10.0))], seed=0)
    assert one is not None
    assert (one.value, one.low, one.high) == (2.0, None, None)
    assert not one.includes_one
    assert rate_ratio([(Amount(0, 0.0), Amount(10, 10.0))], seed=0) is None


def test_pooled_ratio_weighs_by_tokens() -> None:
    pairs = [(Amount(100, 10.0), Amount(100, 20.0)), (Amount(1, 10.0), Amount(1, 1.0))]
    interval = rate_ratio(pairs, seed=0)
    assert interval is not None
    assert interval.value == pytest.approx((101 / 20) / (101 / 21))


def test_a_slower_machine_does_not_move_the_change_of_a_speedup() -> None:
    before = [(Amount(20, 10.0 + i), Amount(10, 10.0)) for i in range(5)]
    slower = [(Amount(a.tokens, 3 * a.seconds), Amount(b.tokens, 3 * b.seconds)) for a, b in before]
    change = ratio_change([(*s, *b) for s, b in zip(slower, before, strict=True)], seed=0)
    assert change is not None
    assert change.value == pytest.approx(1.0)
    assert (change.low, change.high) == pytest.approx((1.0, 1.0))


def test_a_disturbed_run_is_an_outlier() -> None:
    steady, disturbed = [1.0] * 10, [1.0] * 5 + [4.0] * 5
    assert outliers([steady, steady, disturbed, steady]) == [2]
    assert outliers([steady, steady]) == []
    assert outliers([]) == []


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([7] * 24, 1),
        (list(range(30)), None),
        ([1, 2, 3] * 8, 3),
        ([9, 9, *[1, 2, 3] * 8], 3),
        ([1, 2, 3] * 7, None),  # too short to tell
        (list(range(20)) * 2, None),  # twice is not a loop
        (list(range(20)) * 3, 20),
        ([1, 2, 3] * 8 + [4], None),  # it got out
        ([], None),
    ],
)
def test_loops(tokens: list[int], period: int | None) -> None:
    assert loop_period(tokens) == period


def test_looping_answers_are_flagged() -> None:
    arms = two_arms([])
    arms[1].tokens = lambda i: 100 + i % 2
    arms[0].tokens = lambda i: 100 + i % 2
    found = measured(arms, questions(2), Plan(max_new_tokens=40))
    results = summaries(arms, found)
    assert [arm.looping for arm in results] == [2, 2]
    said = warnings(results, found.runs, Conditions(0.0))
    assert any("run in circles (q0, q1)" in line for line in said)


def test_differing_tokens_are_found_and_shown() -> None:
    arms = two_arms([])
    arms[1].tokens = lambda i: 100 + i if i < 5 else 7
    found = measured(arms, questions(3), Plan(max_new_tokens=9))
    gaps = iter([5e-5, 0.3, 0.3])
    infos = [arm.info for arm in arms]
    plain, tree = summarise(infos, found.runs, lambda _run, _i: next(gaps), seed=0)
    assert plain.equality is None, "it is the reference"
    assert tree.equality is not None
    assert (tree.equality.compared, tree.equality.identical) == (3, 0)
    first = tree.equality.divergences[0]
    assert (first.index, first.expected, first.got, first.near_tie) == (5, 105, 7, True)
    said = warnings([plain, tree], found.runs, Conditions(0.0))
    assert any("other tokens than plain on 3 of 3 answers (1 at a near-tie)" in x for x in said)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1], [1, 3]) == 1
    assert compare([], [], no_gap).compared == 0


def test_warnings_of_the_surroundings() -> None:
    arms = two_arms([])
    found = measured(arms, questions(3), Plan(max_new_tokens=9))
    results = summaries(arms, found)
    assert warnings(results, found.runs, Conditions(0.05)) == []
    around = Conditions(0.4, random_prompts=["q1"], trained_on=["tree"])
    said = " ".join(warnings(results, found.runs, around))
    assert "other processes used 40%" in said
    assert "1 prompts read like random tokens" in said
    assert "tree tree was built from these very prompts" in said


def test_warnings_of_an_arm() -> None:
    arms = two_arms([])
    found = measured(arms, questions(3), Plan(max_new_tokens=30))
    tree = summaries(arms, found)[1]
    assert tree.speedup is not None

    def said(**changes: object) -> str:
        return " ".join(warnings([replace(tree, **changes)], [], Conditions(0.0)))

    assert said() == ""
    assert "includes 1" in said(speedup=replace(tree.speedup, low=0.9, high=1.3))
    assert "one question gives no interval" in said(speedup=replace(tree.speedup, low=None))
    assert "no draft was accepted in 40 steps" in said(accept_lengths={1: 40})
    assert "2 of 3 runs were disturbed" in said(outliers=2)
    assert "3 of 3 answers ended before" in said(ended=3)
    typical = SamplingConfig(temperature=1.0, acceptance=Acceptance.TYPICAL)
    assert "lossy" in said(info=replace(tree.info, sampling=typical))


def test_node_counts_as_answers_go_on_and_by_category() -> None:
    arms = two_arms([])
    # Two tokens a step: the first 16 steps of an answer verify 4 nodes, later ones the root alone.
    arms[1].nodes = lambda emitted: 4 if emitted < 32 else 1
    found = measured(arms, questions(3), Plan(max_new_tokens=65))
    plain, tree = summaries(arms, found)
    assert plain.nodes is None
    assert tree.nodes == NodeCounts(mean=2.5, most=4, drafted=3 * 16, over_time=(4.0, 1.0))
    assert [row.mean_nodes for row in tree.categories] == [2.5, 2.5]
    over_time, by_category = nodes_tables([plain, tree])
    assert over_time.columns == ("arm", "mean", "most", "root alone", "1-16", "17-32")
    assert over_time.rows == (("tree", "2.5", "4", "50%", "4.0", "1.0"),)
    assert by_category.rows == (("even", "2.5"), ("odd", "2.5"))
    arms[1].nodes = lambda _emitted: TREE.nodes
    assert nodes_tables(summaries(arms, measured(arms, questions(3), Plan(9)))) == []


def test_speculation_that_does_not_pay_is_said_plainly() -> None:
    arms = two_arms([])
    arms[1].seconds = lambda _ids: 2.5
    tree = summaries(arms, measured(arms, questions(2), Plan(max_new_tokens=9)))[1]
    assert tree.pays is False
    line = break_even(tree)
    assert line == (
        "tree: a step costs 2.50x a plain one; break-even at 2.00x, its accept length: "
        "speculation does not pay here"
    )


def test_rows_by_category_add_up() -> None:
    arms = two_arms([])
    arms[1].seconds = lambda ids: 1.6 if ids[0] % 2 else 0.8
    _, tree = summaries(arms, measured(arms, questions(4), Plan(max_new_tokens=17)))
    even, odd = tree.categories
    assert (even.category, even.questions, odd.category, odd.questions) == ("even", 2, "odd", 2)
    assert even.speedup is not None
    assert odd.speedup is not None
    assert even.speedup.value == pytest.approx(1.25)
    assert odd.speedup.value == pytest.approx(2.5)


def test_tables_in_text_markdown_and_csv() -> None:
    table = Table("Title", ("arm", "x"), (("plain", "1"), ("a|b", "22")), ("a note",))
    assert to_text([table]) == "Title\n\narm     x\nplain   1\na|b    22\n\na note\n"
    assert "| a\\|b | 22 |" in to_markdown([table])
    assert to_csv([table]) == "table,arm,x\nTitle,plain,1\nTitle,a|b,22\n"


def test_a_comparison_says_when_nothing_was_shown() -> None:
    pairs = [(Amount(10, 10.0), Amount(10, 10.0)), (Amount(30, 10.0), Amount(10, 10.0))]
    change = ArmChange("tree", (1.0, 2.0), rate_ratio(pairs, 0), None, (1.5, 1.6), (9, 8), 2, 2)
    table = comparison_tables(Comparison("a", "b", (change,), (), ("dtype: x > y",)))[0]
    assert any("no difference in tokens/s was shown for tree" in note for note in table.notes)
    assert "differs: dtype: x > y" in table.notes
