"""The benchmark proper: which arms run on which questions, and the report about it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_cli.bench.arms import Arm, Unavailable, plain_arm, tree_arm
from medusa_cli.bench.honesty import Conditions, warnings
from medusa_cli.bench.machine import OtherLoad, environment, memory_meter
from medusa_cli.bench.peers import PeerSetup, needs_stock, peer_arm
from medusa_cli.bench.report import BenchReport
from medusa_cli.bench.runner import Conversation, Measurement, Plan, Run, Runner
from medusa_cli.bench.summary import summarise
from medusa_cli.config import SamplingConfig
from medusa_cli.decoding.adaptive import AnyTree
from medusa_cli.errors import UsageError
from medusa_cli.models.base import BaseModel, Engine
from medusa_cli.models.cache import KVCache
from medusa_cli.models.tensor_files import tensors_sha256
from medusa_cli.session import Medusa
from medusa_cli.text.prompt_files import Question, questions_sha256

RANDOM_SHARE = 0.75  # of the entropy of uniform tokens
READ_TOKENS = 64  # of a prompt's end, to tell whether it reads like noise
SHOWN_GAPS = 8  # divergences whose logit gap is worth a forward


@dataclass(frozen=True, slots=True)
class Contest:
    """What is compared.

    Attributes:
        trees: by the name that reports use; each gives an arm for each sampling.
        samplings: one for each acceptance rule that is compared.
        peers: other decoders, by the names that `--against` takes.
        baseline: whether plain decoding runs.
        ignore_eos: go on after end tokens.
    """

    trees: dict[str, AnyTree]
    samplings: tuple[SamplingConfig, ...]
    peers: tuple[str, ...] = ()
    baseline: bool = True
    ignore_eos: bool = False


def enter(model: Medusa, contest: Contest, setup: PeerSetup) -> tuple[list[Arm], list[Unavailable]]:
    """The arms of a contest, and those that cannot run here.

    Raises:
        TreeError: the heads cannot draft one of the trees.
        UsageError: two arms have one name.
    """
    first = contest.samplings[0]
    eos = contest.ignore_eos
    arms: list[Arm] = [plain_arm(model, first, ignore_eos=eos)] if contest.baseline else []
    for label, tree in contest.trees.items():
        for sampling in contest.samplings:
            several = len(contest.samplings) > 1
            name = f"{label} {sampling.acceptance}" if several else label
            arms.append(tree_arm(model, tree, sampling, name=name, ignore_eos=eos))
    absent = []
    if type(model.base.engine) is not Engine and any(map(needs_stock, contest.peers)):
        setup = setup.with_stock(model)
    for peer in dict.fromkeys(contest.peers):
        arm = peer_arm(peer, model, setup)
        if isinstance(arm, Unavailable):
            absent.append(arm)
        else:
            arms.append(arm)
    names = [arm.info.name for arm in arms]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise UsageError(f"two arms are called '{twice}': give the tree another name")
    return arms, absent


def conversation(model: Medusa) -> Conversation:
    """Questions rendered by the model's chat template, or as raw text where it has none."""

    def decode(ids: Sequence[int]) -> str:
        return str(model.tokenizer.decode(list(ids), skip_special_tokens=True))

    return Conversation(model.encode_turn, decode, model.turns, model.base.context_length)


def run_benchmark(
    model: Medusa,
    arms: Sequence[Arm],
    questions: Sequence[Question],
    plan: Plan,
    measurement: Measurement,
    on_run: Callable[[Run], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> Conditions:
    """Runs everything into `measurement`; an interrupt ends it early and is not raised.

    Args:
        on_run: hears every finished run.
        should_stop: asked after each step; True is an interrupt.
    """
    talk = conversation(model)
    load = OtherLoad()
    noise: list[str] = []
    try:
        for question in questions:
            if should_stop():
                raise KeyboardInterrupt
            if reads_like_noise(model.base, talk.encode(question, [])):
                noise.append(question.id)
        load = OtherLoad()
        meter = memory_meter(model.base.device)
        runner = Runner(arms, talk, plan, on_run, meter, should_stop=should_stop)
        runner.run(questions, measurement)
    except KeyboardInterrupt:
        measurement.complete = False
    return Conditions(load.share(), noise, (), measurement.skipped, measurement.complete)


def make_report(
    model: Medusa,
    arms: Sequence[Arm],
    questions: Sequence[Question],
    measurement: Measurement,
    around: Conditions,
    settings: dict[str, Any],
    seed: int,
) -> BenchReport:
    """Summaries, hashes and warnings of a measurement."""
    infos = [arm.info for arm in arms]
    gaps = _Gaps(model.base, greedy=infos[0].sampling.temperature == 0)
    summaries = summarise(infos, measurement.runs, gaps, seed)
    hashes = {
        "weights": tensors_sha256(dict(model.base.module.named_parameters())),
        "prompts": questions_sha256(questions),
    }
    if model.heads is not None:
        hashes["heads"] = tensors_sha256(dict(model.heads.heads.named_parameters()))
    return BenchReport(
        model=model.name,
        heads=None if model.heads is None else model.heads.info.name,
        hashes=hashes,
        settings=settings,
        environment=environment(model.base),
        arms=tuple(summaries),
        unavailable=tuple(measurement.unavailable),
        runs=tuple(measurement.runs),
        warnings=tuple(warnings(summaries, measurement.runs, around)),
        complete=measurement.complete,
    )


@torch.inference_mode()
def reads_like_noise(base: BaseModel, ids: Sequence[int]) -> bool:
    """Whether the model finds a prompt's end about as likely as random tokens."""
    end = torch.tensor(list(ids)[-READ_TOKENS:], device=base.device)  # [M]
    if len(end) < 2:
        return False
    logits = base.extend(end, KVCache()).logits.float()  # [M, V]
    loss = torch.nn.functional.cross_entropy(logits[:-1], end[1:].to(logits.device))
    return float(loss) > RANDOM_SHARE * math.log(base.vocab_size)


class _Gaps:
    """The base model's top-2 logit gap at a token of an answer, for the first few asked for.

    Under sampling it tells nothing: there the scores carry noise.
    """

    def __init__(self, base: BaseModel, *, greedy: bool) -> None:
        self._base, self._left = base, SHOWN_GAPS if greedy else 0

    def __call__(self, run: Run, index: int) -> float | None:
        if self._left == 0:
            return None
        self._left -= 1
        ids = torch.tensor([*run.prompt_ids, *run.token_ids[:index]], device=self._base.device)
        best = self._base.prefill(ids, KVCache()).logits[0].float().topk(2).values
        return float(best[0] - best[1])
