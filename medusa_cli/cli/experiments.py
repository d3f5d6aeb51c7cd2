"""The experiments of `bench`, each from a loaded model to findings."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from medusa_cli.bench import comparison, roofline_report
from medusa_cli.bench import sweep_nodes as nodes
from medusa_cli.bench import sweep_temperature as warmth
from medusa_cli.bench.arms import Arm, plain_arm, tree_arm
from medusa_cli.bench.benchmark import Contest, enter, make_report, run_benchmark
from medusa_cli.bench.machine import environment
from medusa_cli.bench.peers import PeerSetup, check_peer
from medusa_cli.bench.report import BenchReport, to_data
from medusa_cli.bench.result_tables import tables
from medusa_cli.bench.roofline import BATCHES, CONTEXTS, NODES, measure_roofline
from medusa_cli.bench.roofline_plot import plot_roofline
from medusa_cli.bench.runner import Measurement, Plan, Run
from medusa_cli.bench.sweep_plot import (
    draw_nodes,
    draw_temperatures,
    plot_nodes,
    plot_temperatures,
)
from medusa_cli.cli.bench_output import Findings
from medusa_cli.cli.bench_progress import BenchProgress
from medusa_cli.cli.bench_request import BenchRequest
from medusa_cli.cli.interrupt import interruptible
from medusa_cli.cli.streams import Streams
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.adaptive import AUTO, AnyTree
from medusa_cli.decoding.auto_tree import refresh_costs
from medusa_cli.decoding.measured import ScoredTraces, load_scored_traces
from medusa_cli.decoding.tree import load_tree
from medusa_cli.errors import MedusaError, UsageError
from medusa_cli.models.loader import LoadOptions
from medusa_cli.models.sources import Finder
from medusa_cli.session import Medusa
from medusa_cli.text.prompt_files import Question, read_questions, spread
from medusa_cli.training import accuracy


def check(request: BenchRequest, *, defaults: bool) -> None:
    """Raises an error of ours for what can be told before a model is loaded.

    Args:
        defaults: whether the model's own sampling values will be added to the request.
    """
    for peer in request.against:
        check_peer(peer)
    for typed in request.trees:
        if typed != AUTO:
            load_tree(typed)
    read_questions(request.prompts)
    if not defaults:
        _samplings(request)


def contest(model: Medusa, request: BenchRequest, streams: Streams) -> Findings:
    """Trees, plain decoding and peers against each other.

    Raises:
        TreeError: the heads cannot draft one of the trees.
        MedusaError: no arm could run.
    """
    questions = spread(read_questions(request.prompts), request.limit)
    samplings = _samplings(request)
    trees = _trees(request, model)
    if model.heads is not None and not trees:
        trees = {model.tree.name: model.tree}
    entered = Contest(trees, samplings, request.against, request.baseline, request.ignore_eos)
    setup = PeerSetup(
        samplings[0],
        request.ignore_eos,
        Finder(None, request.loading.offline),
        LoadOptions(
            device=str(model.base.device),
            dtype=str(model.base.dtype).removeprefix("torch."),
            trust_remote_code=request.loading.trust_remote_code,
            quantize=request.loading.quantize,
        ),
    )
    arms, absent = enter(model, entered, setup)
    if not arms:
        reasons = "; ".join(f"{arm.name}: {arm.reason}" for arm in absent)
        raise MedusaError(f"nothing to measure: {reasons or 'no arm was asked for'}")
    measurement = Measurement(unavailable=list(absent))
    report = _measured(model, arms, questions, request, measurement, streams)
    data = to_data(report, _token_text(model))
    return Findings(tables(report, _token_text(model)), data, complete=report.complete)


def sweep_nodes(
    model: Medusa, counts: Sequence[int], request: BenchRequest, streams: Streams
) -> Findings:
    """Cost and gain of tree nodes; keeps the step costs for the decoder.

    Raises:
        UsageError: the model has no heads.
    """
    with (
        interruptible() as interrupts,
        BenchProgress(streams, None, quiet=request.loading.quiet) as progress,
    ):
        scored = _traces(model, request, progress, interrupts)
        if not scored.traces.texts and interrupts():
            raise KeyboardInterrupt
        sweep = nodes.sweep_nodes(
            model, scored, counts, _where(model), progress.note, should_stop=interrupts
        )
        assert model.heads is not None, "traces need heads"
        refresh_costs(model.base, model.heads, lambda stage: progress.note(stage.text))
    if request.plot is not None:
        plot_nodes(sweep, request.plot)
    return Findings(nodes.tables(sweep), nodes.to_data(sweep), draw_nodes(sweep), sweep.complete)


def sweep_temperature(
    model: Medusa, temperatures: Sequence[float], request: BenchRequest, streams: Streams
) -> Findings:
    """Lossless against typical acceptance over temperatures.

    Raises:
        UsageError: the model has no heads, or more than one tree was given.
    """
    if model.heads is None:
        raise UsageError("--sweep-temperature needs heads: give some with --heads")
    named = _trees(request, model)
    if len(named) > 1:
        raise UsageError("--sweep-temperature measures one tree: give one --tree")
    tree = next(iter(named.values()), model.tree)
    questions = spread(read_questions(request.prompts), request.limit)
    points: list[warmth.TemperaturePoint] = []
    warnings: list[str] = []
    complete = True
    for temperature in temperatures:
        base = SamplingConfig(**request.given, temperature=temperature)
        rules = list(Acceptance) if temperature > 0 else [Acceptance.LOSSLESS]
        samplings = tuple(replace(base, acceptance=rule) for rule in rules)
        arms = [plain_arm(model, base, ignore_eos=request.ignore_eos)]
        arms += [
            tree_arm(model, tree, s, name=s.acceptance, ignore_eos=request.ignore_eos)
            for s in samplings
        ]
        report = _measured(model, arms, questions, request, Measurement(), streams)
        warnings += [f"temperature {temperature:g}: {warning}" for warning in report.warnings]
        for arm, sampling in zip(report.arms[1:], samplings, strict=False):
            runs = [run for run in report.runs if run.arm == arm.info.name]
            moved = warmth.mean_divergence(model.base, runs, sampling) if sampling.lossy else 0.0
            points.append(warmth.TemperaturePoint(temperature, sampling.acceptance, arm, moved))
        if not report.complete:
            complete = False
            break
    sweep = warmth.TemperatureSweep(
        model.name, model.heads.info.name, tree.name, _where(model), tuple(points),
        tuple(warnings), complete,
    )  # fmt: skip
    if request.plot is not None:
        plot_temperatures(sweep, request.plot)
    art = draw_temperatures(sweep)
    return Findings(warmth.tables(sweep), warmth.to_data(sweep), art, complete)


def roofline(model: Medusa, request: BenchRequest, streams: Streams) -> Findings:
    """Where memory bandwidth and where arithmetic limits a step."""
    with (
        interruptible() as interrupts,
        BenchProgress(streams, None, quiet=request.loading.quiet) as progress,
    ):
        found = measure_roofline(
            model, NODES, CONTEXTS, BATCHES, progress.note, should_stop=interrupts
        )
    if request.plot is not None:
        plot_roofline(found, request.plot)
    return Findings(
        roofline_report.tables(found), roofline_report.to_data(found), complete=found.complete
    )


def compare(before: Path, after: Path, seed: int) -> Findings:
    """What changed between two reports."""
    found = comparison.compare(before, after, seed)
    return Findings(comparison.tables(found), comparison.to_data(found))


def _traces(
    model: Medusa,
    request: BenchRequest,
    progress: BenchProgress,
    should_stop: Callable[[], bool],
) -> ScoredTraces:
    """The traces kept for these heads; measured now where there are none, or texts were named."""
    of = accuracy.measured_subject(model)
    if model.heads is None or of is None:
        raise UsageError("--sweep-nodes needs heads: give some with --heads")
    kept = None if request.own_texts else load_scored_traces(of)
    if kept is not None:
        return kept
    questions = read_questions(request.prompts)
    prompts = accuracy.PromptSet(request.prompts, accuracy.prompts_digest(questions))
    found = accuracy.measure_heads(
        model,
        spread(questions, request.limit),
        request.max_new_tokens,
        prompts,
        lambda stage: progress.note(stage.text),
        should_stop,
    )
    calibrated = found.calibrated()
    return ScoredTraces(found.traces, None if calibrated is None else calibrated.scores)


def _where(model: Medusa) -> str:
    about = environment(model.base)
    return f"{about['dtype']} on {about['device_name']}, {about['threads']} threads"


def _measured(
    model: Medusa,
    arms: Sequence[Arm],
    questions: Sequence[Question],
    request: BenchRequest,
    measurement: Measurement,
    streams: Streams,
) -> BenchReport:
    """Runs the arms, with progress on standard error, and reports on them."""
    plan = Plan(request.max_new_tokens, request.warmup, request.repeats)
    turns = sum(map(model.turns, questions))
    names = ", ".join(arm.info.name for arm in arms)
    pieces = turns * len(arms) * plan.repeats
    with (
        interruptible() as interrupts,
        BenchProgress(streams, pieces, quiet=request.loading.quiet) as progress,
    ):
        progress.note(f"{turns} prompts x {len(arms)} arms ({names}), {plan.warmup} warm-up runs")

        def on_run(run: Run) -> None:
            rate = run.decoded.tokens / run.decoded.seconds if run.decoded.seconds else 0.0
            progress.advance(f"{run.question}/{run.turn + 1}  {run.arm}  {rate:.1f} tok/s")

        around = run_benchmark(model, arms, questions, plan, measurement, on_run, interrupts)
    mark = f"prompts {accuracy.prompts_digest(read_questions(request.prompts))}"
    built_here = [arm.info.name for arm in arms if mark in getattr(arm.info.tree, "origin", "")]
    around = replace(around, trained_on=built_here)
    settings = {
        "trees": [arm.info.tree.name for arm in arms if arm.info.tree],
        "against": request.against,
        "prompts": request.prompts,
        "limit": request.limit,
        "max_new_tokens": request.max_new_tokens,
        "ignore_eos": request.ignore_eos,
        "warmup": request.warmup,
        "repeats": request.repeats,
        **asdict(arms[0].info.sampling),
    }
    return make_report(
        model, arms, questions, measurement, around, settings, arms[0].info.sampling.seed
    )


def _samplings(request: BenchRequest) -> tuple[SamplingConfig, ...]:
    """One configuration for each acceptance rule, with the same seed."""
    rules = dict.fromkeys(request.acceptance) or {Acceptance.LOSSLESS: None}
    first = SamplingConfig(**request.given, acceptance=next(iter(rules)))
    return tuple(replace(first, acceptance=rule) for rule in rules)


def _trees(request: BenchRequest, model: Medusa) -> dict[str, AnyTree]:
    """The trees asked for, by name; by what was typed where two have the same name."""
    trees = {typed: model.with_tree(typed).tree for typed in dict.fromkeys(request.trees)}
    names = [tree.name for tree in trees.values()]
    return {
        tree.name if names.count(tree.name) == 1 else typed: tree for typed, tree in trees.items()
    }


def _token_text(model: Medusa) -> Callable[[int], str]:
    return lambda token: str(model.tokenizer.decode([token]))
