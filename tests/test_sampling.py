"""Sampling: keyed noise, transformers' warpers, and distributions by chi-square."""

from itertools import product
from typing import Any

import pytest
import torch
import transformers
from scipy import stats
from torch import Tensor

from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.acceptance import accept
from medusa_cli.decoding.sampling import Sampler, keyed_gumbel, typical_set
from medusa_cli.decoding.tree import static_tree
from medusa_cli.decoding.tree_buffers import tree_buffers
from medusa_cli.errors import UsageError

CPU = torch.device("cpu")
TOY_VOCAB = 12
SAMPLES = 2500


def toy_logits(context: int) -> Tensor:
    """[TOY_VOCAB], the logits of a toy base model that looks at the last token only."""
    generator = torch.Generator().manual_seed(context)
    return torch.randn(TOY_VOCAB, generator=generator) * 1.5


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """p-value of observed counts under expected probabilities; impossible tokens must not occur."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    if possible.sum() == 1:
        return 1.0
    expected = probabilities[possible].double() * counts.sum()
    expected *= counts.sum() / expected.sum()
    return float(stats.chisquare(counts[possible].double(), expected).pvalue)


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    noise = keyed_gumbel(5, 7, 1000, CPU)
    assert torch.equal(noise, keyed_gumbel(5, 7, 1000, CPU))
    assert torch.equal(noise[:10], keyed_gumbel(5, 7, 10, CPU))
    assert torch.equal(noise, keyed_gumbel(5, torch.tensor(7), 1000, CPU))
    assert not torch.equal(noise, keyed_gumbel(6, 7, 1000, CPU))
    assert not torch.equal(noise, keyed_gumbel(5, 8, 1000, CPU))
    assert keyed_gumbel(2**63 - 1, 2**40, 10, CPU).isfinite().all()


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    noise = torch.stack([keyed_gumbel(3, position, 500, CPU) for position in range(100)])
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 0.001
    for step in (noise[1:], noise[:, 1:]):
        base = noise[: step.shape[0], : step.shape[1]]
        correlation = torch.corrcoef(torch.stack([base.flatten(), step.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.02


def test_neighbouring_seeds_give_unrelated_noise() -> None:
    pair = torch.stack([keyed_gumbel(1, 0, 20_000, CPU), keyed_gumbel(2, 0, 20_000, CPU)])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.03


def test_greedy_ignores_noise() -> None:
    logits = toy_logits(0)[None]
    assert int(Sampler(SamplingConfig(seed=4), CPU).choose(logits, None, 3)) == logits.argmax()


@pytest.mark.parametrize(
    ("values", "warpers"),
    [
        ({"top_k": 4}, [transformers.TopKLogitsWarper(4)]),
        ({"top_p": 0.7}, [transformers.TopPLogitsWarper(0.7)]),
        ({"min_p": 0.2}, [transformers.MinPLogitsWarper(0.2)]),
        ({"typical_p": 0.6}, [transformers.TypicalLogitsWarper(0.6)]),
        ({"epsilon_cutoff": 0.05}, [transformers.EpsilonLogitsWarper(0.05)]),
        ({"eta_cutoff": 0.1}, [transformers.EtaLogitsWarper(0.1)]),
        (
            {"top_k": 6, "top_p": 0.8},
            [transformers.TopKLogitsWarper(6), transformers.TopPLogitsWarper(0.8)],
        ),
    ],
)
def test_warping_is_that_of_transformers(values: dict[str, Any], warpers: list[Any]) -> None:
    logits = torch.stack([toy_logits(context) for context in range(20)])
    expected = logits / 0.9
    for warper in warpers:
        expected = warper(None, expected)
    sampler = Sampler(SamplingConfig(temperature=0.9, seed=1, **values), CPU)
    warped = sampler.warp(logits, None)
    assert torch.equal(warped.truncated, expected)
    assert (expected == -torch.inf).any()
    assert torch.equal(warped.scores, logits / 0.9)


TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"typical_p": 0.7},
    {"eta_cutoff": 0.1},
    {"epsilon_cutoff": 0.05},
    {"top_k": 5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7},
]
# A tree with likely and unlikely tokens at every node, so that walks of all lengths occur.
TREE = tree_buffers(static_tree("t", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), CPU)
TOKENS = torch.tensor([3, 1, 5, 7, 2, 9, 4, 6])


def second_token_counts(config: dict[str, Any], tree: Any, tokens: Tensor) -> Tensor:
    """Counts [TOY_VOCAB, TOY_VOCAB] of the first two tokens that follow the root, over seeds."""
    counts = torch.zeros(TOY_VOCAB, TOY_VOCAB)
    logits = torch.stack([toy_logits(int(token)) for token in tokens])
    for seed in range(SAMPLES):
        sampler = Sampler(SamplingConfig(seed=seed, **config), CPU)
        context = torch.tensor([8, 8]) if sampler.needs_prefix else None
        emitted: list[int] = []
        root = int(tokens[0])
        verdict = accept(logits, tokens, tree, sampler, context, 2)
        path = verdict.path.tolist()[: int(verdict.drafts) + 1]
        emitted = [*tokens[path[1:]].tolist(), int(verdict.next_token)]
        if len(emitted) == 1:
            prefix = torch.tensor([[8, 8, root, emitted[0]]]) if sampler.needs_prefix else None
            emitted.append(int(sampler.choose(toy_logits(emitted[0])[None], prefix, 3)))
        counts[emitted[0], emitted[1]] += 1
    return counts


def base_distribution(config: dict[str, Any], last: int, prefix: list[int]) -> Tensor:
    """The base model's own distribution behind token `last`, from transformers' parts."""
    sampler = Sampler(SamplingConfig(seed=0, **config), CPU)
    prefixes = torch.tensor([prefix]) if sampler.needs_prefix else None
    return sampler.warp(toy_logits(last)[None], prefixes).truncated[0].softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=lambda t: "-".join(t) or "none")
def test_lossless_sampling_has_the_base_distribution(
    temperature: float, truncation: dict[str, Any]
) -> None:
    """Of the first token, and of the second one behind each frequent first one."""
    config = {"temperature": temperature, **truncation}
    counts = second_token_counts(config, TREE, TOKENS)
    first = base_distribution(config, 3, [8, 8, 3])
    assert chi_square(counts.sum(dim=1), first) > 1e-4
    frequent = [t for t in range(TOY_VOCAB) if counts[t].sum() > 200]
    assert frequent
    for token in frequent:
        expected = base_distribution(config, token, [8, 8, 3, token])
        assert chi_square(counts[token], expected) > 1e-4


def test_the_chi_square_test_can_fail() -> None:
    counts = second_token_counts({"temperature": 1.0}, TREE, TOKENS).sum(dim=1)
    assert chi_square(counts, base_distribution({"temperature": 1.3}, 3, [])) < 1e-4


def test_a_seed_gives_the_same_tokens_under_every_tree() -> None:
    trees = [
        (TREE.limited(0), TOKENS[:1]),
        (TREE, TOKENS),
        (tree_buffers(static_tree("chain", [[0], [0, 0]]), CPU), torch.tensor([3, 5, 4])),
    ]
    for truncation in TRUNCATIONS:
        for seed in range(30):
            config = SamplingConfig(temperature=1.0, seed=seed, **truncation)
            texts = [simulate(tree, tokens, config) for tree, tokens in trees]
            assert texts[0] == texts[1] == texts[2]


def simulate(tree: Any, tokens: Tensor, config: SamplingConfig, length: int = 8) -> list[int]:
    """Decodes the toy model with the same drafts at every step."""
    ids = [8, 8, 3]
    sampler = Sampler(config, CPU)
    while len(ids) < 3 + length:
        step_tokens = tokens.clone()
        step_tokens[0] = ids[-1]
        logits = torch.stack([toy_logits(int(token)) for token in step_tokens])
        context = torch.tensor(ids[:-1]) if sampler.needs_prefix else None
        verdict = accept(logits, step_tokens, tree, sampler, context, len(ids))
        path = verdict.path.tolist()[: int(verdict.drafts) + 1]
        ids += [*step_tokens[path[1:]].tolist(), int(verdict.next_token)]
    return ids[: 3 + length]


def test_typical_acceptance_stays_in_its_set() -> None:
    config = {"temperature": 1.3, "acceptance": Acceptance.TYPICAL, "epsilon": 0.2, "delta": 0.5}
    counts = second_token_counts(config, TREE, TOKENS)
    sampling = SamplingConfig(seed=0, **config)
    warped = Sampler(sampling, CPU).warp(toy_logits(3)[None], None)
    allowed = typical_set(warped, sampling)[0]
    assert counts.sum(dim=1)[~allowed].sum() == 0
    assert (counts.sum(dim=1)[allowed] > 0).any()


def test_every_combination_of_temperature_and_truncation_runs() -> None:
    logits = toy_logits(1)[None]
    prefix = torch.tensor([[1, 2, 3]])
    for temperature, top_p, top_k, rule, penalty in product(
        (0.01, 0.7, 1.0, 100.0), (0.01, 0.5, 1.0), (0, 1, 50), Acceptance, (1.0, 2.0)
    ):
        config = SamplingConfig(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            acceptance=rule,
            repetition_penalty=penalty,
            seed=3,
        )
        token = int(Sampler(config, CPU).choose(logits, prefix, 5))
        assert 0 <= token < TOY_VOCAB


def test_half_precision_logits_are_warped_in_float32() -> None:
    sampler = Sampler(SamplingConfig(temperature=0.5, seed=1), CPU)
    assert sampler.warp(toy_logits(1)[None].bfloat16(), None).truncated.dtype is torch.float32


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"typical_p": 0.0},
        {"eta_cutoff": 1.0},
        {"epsilon_cutoff": -0.1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**63},
        {"epsilon": 0.0},
        {"delta": 1.0},
        {"acceptance": Acceptance.TYPICAL},
        {"acceptance": "nonsense"},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingConfig(**values)


def test_acceptance_may_be_given_as_text() -> None:
    config = SamplingConfig(temperature=1.0, acceptance="typical")
    assert config.acceptance is Acceptance.TYPICAL
    assert config.lossy


def test_a_seed_is_chosen_when_none_is_given() -> None:
    assert len({SamplingConfig().seed for _ in range(5)}) == 5


def test_options_without_effect_are_named() -> None:
    given = {"top_p": 0.9, "epsilon": 0.1, "repetition_penalty": 1.2}
    assert SamplingConfig().ineffective(given) == ["epsilon", "top_p"]
    assert SamplingConfig(temperature=1.0).ineffective(given) == ["epsilon"]
