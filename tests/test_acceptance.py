"""Acceptance rules on hand-written logits."""

import math

import pytest
import torch
from torch import Tensor

from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.acceptance import Verdict, accept
from medusa_cli.decoding.sampling import Sampler, Warped, typical_set
from medusa_cli.decoding.tree import static_tree
from medusa_cli.decoding.tree_buffers import tree_buffers

CPU = torch.device("cpu")
GREEDY = SamplingConfig()
# Nodes: 0 root, 1 [0], 2 [1], 3 [0, 0], 4 [1, 0], 5 [1, 0, 0]
TREE = tree_buffers(static_tree("t", [[0], [1], [0, 0], [1, 0], [1, 0, 0]]), CPU)
TOKENS = torch.tensor([9, 1, 2, 3, 4, 5])


def wanting(*tokens: int, vocab: int = 10) -> Tensor:
    """Logits whose argmax at node i is `tokens[i]`."""
    logits = torch.zeros(len(tokens), vocab)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return logits


def outcome(verdict: Verdict) -> tuple[list[int], int]:
    drafts = int(verdict.drafts)
    return verdict.path.tolist()[: drafts + 1], int(verdict.next_token)


@pytest.mark.parametrize(
    ("wanted", "path", "next_token"),
    [
        ((7, 7, 7, 7, 7, 7), [0], 7),  # never
        ((2, 7, 4, 7, 5, 8), [0, 2, 4, 5], 8),  # always
        ((2, 7, 4, 7, 6, 8), [0, 2, 4], 6),  # sometimes
        ((1, 3, 4, 6, 5, 8), [0, 1, 3], 6),  # the other branch
        ((7, 3, 4, 6, 5, 8), [0], 7),  # good grandchildren of rejected nodes do not count
    ],
)
def test_greedy_walk(wanted: tuple[int, ...], path: list[int], next_token: int) -> None:
    verdict = accept(wanting(*wanted), TOKENS, TREE, Sampler(GREEDY, CPU), None, 1)
    assert outcome(verdict) == (path, next_token)


def test_token_zero_is_a_token_like_any_other() -> None:
    """With token 0 for padding, a base model that wants 0 would accept the padding."""
    tokens = torch.tensor([9, 0, 2, 0, 4, 5])
    verdict = accept(wanting(0, 0, 0, 0, 0, 0), tokens, TREE, Sampler(GREEDY, CPU), None, 1)
    assert outcome(verdict) == ([0, 1, 3], 0)
    none = torch.tensor([9, 1, 2, 3, 4, 5])
    verdict = accept(wanting(0, 0, 0, 0, 0, 0), none, TREE, Sampler(GREEDY, CPU), None, 1)
    assert outcome(verdict) == ([0], 0)


def test_repetition_penalty_sees_the_tokens_on_the_path() -> None:
    """Token 2 is on the path of node 4, so a strong penalty moves its choice to token 6."""
    logits = wanting(2, 7, 4, 7, 2, 8)
    logits[4, 6] = 4.0
    sampler = Sampler(SamplingConfig(repetition_penalty=2.0), CPU)
    context = torch.tensor([8])
    assert outcome(accept(logits, TOKENS, TREE, sampler, context, 1)) == ([0, 2, 4], 6)
    plain = accept(logits, TOKENS, TREE, Sampler(GREEDY, CPU), None, 1)
    assert outcome(plain) == ([0, 2, 4], 2)


def typical_config(**changes: float) -> SamplingConfig:
    return SamplingConfig(
        **{"temperature": 1.0, "seed": 1, "acceptance": Acceptance.TYPICAL, **changes}
    )


def row(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def kept(logits: Tensor, config: SamplingConfig) -> list[int]:
    warped = Sampler(config, CPU).warp(logits, None)
    return typical_set(warped, config)[0].nonzero()[:, 0].tolist()


def test_typical_threshold_by_hand() -> None:
    """p = (1/2, 1/4, 1/8, 1/8): H = 1.75 ln 2, exp(-H) = 2^-1.75 = 0.2973."""
    logits = row(0.5, 0.25, 0.125, 0.125)
    assert math.isclose(math.exp(-1.75 * math.log(2)), 0.2973, abs_tol=1e-4)
    # The entropy term decides: thresholds 0.8 * 0.2973 = 0.238 and 0.9 * 0.2973 = 0.268.
    assert kept(logits, typical_config(epsilon=1.0, delta=0.8)) == [0, 1]
    assert kept(logits, typical_config(epsilon=1.0, delta=0.9)) == [0]
    # The hard threshold decides: 0.2 and 0.1, both below the entropy term.
    assert kept(logits, typical_config(epsilon=0.2, delta=0.9)) == [0, 1]
    assert kept(logits, typical_config(epsilon=0.1, delta=0.9)) == [0, 1, 2, 3]


def test_typical_set_is_never_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.01, 1.0, 50.0):
        logits = torch.randn(8, 50, generator=generator) * scale
        for top_k in (0, 1, 5):
            config = typical_config(delta=0.999, epsilon=1.0, top_k=top_k, typical_p=0.2)
            warped = Sampler(config, CPU).warp(logits, None)
            assert typical_set(warped, config).any(dim=-1).all()


def test_truncation_narrows_the_typical_set() -> None:
    logits = row(0.5, 0.25, 0.125, 0.125)
    assert kept(logits, typical_config(epsilon=0.1, delta=0.9, top_k=2)) == [0, 1]


def test_entropy_of_impossible_tokens_is_no_nan() -> None:
    scores = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert typical_set(Warped(scores, scores), typical_config())[0].tolist() == [True, False, False]


def test_typical_takes_the_likeliest_of_the_longest_paths() -> None:
    """Nodes 3 and 4 are both two deep and typical; node 4's path has the greater probability."""
    logits = torch.full((6, 10), -20.0)
    logits[0, 1], logits[0, 2] = math.log(0.4), math.log(0.6)
    logits[1, 3] = math.log(0.9)
    logits[2, 4] = math.log(0.9)
    logits[4, 7] = 0.0  # token 5, the deepest draft, is impossible
    logits[3, 8] = 0.0
    verdict = accept(logits, TOKENS, TREE, Sampler(typical_config(), CPU), None, 1)
    assert outcome(verdict) == ([0, 2, 4], 7)


def test_typical_prefers_a_longer_path_to_a_likelier_one() -> None:
    logits = torch.full((6, 10), -20.0)
    logits[0, 1], logits[0, 2] = math.log(0.85), math.log(0.15)
    logits[1, 8] = 0.0
    logits[2, 4] = 0.0
    logits[4, 6] = 0.0
    verdict = accept(logits, TOKENS, TREE, Sampler(typical_config(), CPU), None, 1)
    assert outcome(verdict) == ([0, 2, 4], 6)


def test_typical_accepts_nothing_below_the_threshold() -> None:
    logits = wanting(7, 7, 7, 7, 7, 7) * 4
    verdict = accept(logits, TOKENS, TREE, Sampler(typical_config(), CPU), None, 1)
    assert outcome(verdict) == ([0], 7)


def test_typical_root_is_sampled_unless_greedy() -> None:
    logits = row(0.4, 0.3, 0.3).expand(6, 3).contiguous()
    tokens = torch.zeros(6, dtype=torch.long) + 2
    root_only = TREE.limited(0)

    def roots(greedy: bool) -> set[int]:
        found = set()
        for seed in range(40):
            config = SamplingConfig(
                temperature=1.0, seed=seed, acceptance=Acceptance.TYPICAL, greedy_root=greedy
            )
            sampler = Sampler(config, CPU)
            verdict = accept(logits[:1], tokens[:1], root_only, sampler, None, 1)
            found.add(int(verdict.next_token))
        return found

    assert roots(greedy=True) == {0}
    assert roots(greedy=False) == {0, 1, 2}


def test_typical_sees_prefix_processors_on_each_path() -> None:
    logits = wanting(2, 7, 4, 7, 2, 8) * 3
    logits[4, 6] = 13.0
    config = typical_config(repetition_penalty=3.0)
    verdict = accept(logits, TOKENS, TREE, Sampler(config, CPU), torch.tensor([8]), 1)
    assert outcome(verdict) == ([0, 2, 4], 6)
