"""Fitting a calibration to what heads stated along texts that the base model wrote.

What decides a tree is the probability of a whole path: the product of each head's probability given
that the heads before it are right. So a position counts for head k as much as the heads before it
would have made decoding look there: by the calibrated probability of the true path so far.

Answers that run in circles are left out: there even the deepest head is always right, which says
nothing of other text.

Above temperature 0 the truth is the base model's distribution at that temperature, at each position
of the greedy text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa_cli.decoding.adaptive import CANDIDATES
from medusa_cli.decoding.calibration import Calibration, HeadCalibration

SAMPLING_TEMPERATURES = (0.0, 0.7, 1.0)
# Head temperatures that are tried, each a tenth above the one before: the loss is flat around its
# minimum.
TEMPERATURES = tuple(0.5 * 1.1**i for i in range(19))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What K heads stated at P positions, and what was true there.

    S sampling temperatures of the base model, G head temperatures that are tried.
    """

    best: Tensor  # [P, K, C], the greatest logits, falling
    normalisers: Tensor  # [P, K, G], log-sum-exp of the logits over each temperature
    known: Tensor  # [P, K] bool, whether there is a true token
    truth: Tensor  # [P, K], the logit of the greedy token; -inf where it cannot be drafted
    covered: Tensor  # [P, K, S], probability of the tokens that can be drafted
    stated: Tensor  # [P, K, S], sum of probability times logit over them
    weights: Tensor  # [P], 0 where a position is left out of the fit

    def __post_init__(self) -> None:
        assert self.truth.shape == self.known.shape == self.best.shape[:2]


def evidence_of(
    logits: Tensor,  # [K, R, V']
    base_logits: Tensor,  # [R + K, V] or fewer: row r + k chose the token that head k guesses at r
    truth: Tensor,  # [K, R], the greedy tokens; negative where there is none
    draft_token_ids: Tensor | None,  # [V']
    weight: float = 1.0,
) -> Evidence:
    """The evidence of R positions in a row."""
    heads, rows, vocabulary = logits.shape
    # [K, R, V'] in a column of the draft vocabulary, or nowhere
    index = torch.arange(vocabulary, device=logits.device)
    column = truth.new_full((base_logits.shape[-1],), -1)
    column[index if draft_token_ids is None else draft_token_ids] = index.to(column)
    drafted = torch.where(truth >= 0, column[truth.clamp(min=0)], -1)  # [K, R]
    stated_truth = logits.gather(-1, drafted.clamp(min=0)[..., None])[..., 0]  # [K, R]
    stated_truth = stated_truth.masked_fill(drafted < 0, -torch.inf)
    covered, stated = [], []
    for temperature in SAMPLING_TEMPERATURES:
        if temperature == 0:
            covered.append((drafted >= 0).float())
            stated.append(stated_truth.masked_fill(drafted < 0, 0.0))
            continue
        share = (base_logits.float() / temperature).softmax(dim=-1)
        if draft_token_ids is not None:
            share = share[:, draft_token_ids.to(share.device)]
        share = share.to(logits.device)
        aligned = [_rows(share, k + 1, rows) for k in range(heads)]  # K of [R, V']
        covered.append(torch.stack([p.sum(dim=-1) for p in aligned]))
        stated.append(
            torch.stack([(p * z).sum(dim=-1) for p, z in zip(aligned, logits, strict=True)])
        )
    normalisers = torch.stack([(logits / t).logsumexp(dim=-1) for t in TEMPERATURES], dim=-1)
    best = logits.topk(min(CANDIDATES, vocabulary), dim=-1).values
    return Evidence(
        best.transpose(0, 1).cpu(),
        normalisers.transpose(0, 1).cpu(),
        (truth >= 0).T.cpu(),
        stated_truth.T.cpu(),
        torch.stack(covered, dim=-1).transpose(0, 1).cpu(),
        torch.stack(stated, dim=-1).transpose(0, 1).cpu(),
        torch.full((rows,), weight),
    )


def joined(parts: Sequence[Evidence]) -> Evidence:
    """The evidence of all positions, in order."""
    names = Evidence.__dataclass_fields__
    return Evidence(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def fit(evidence: Evidence) -> Calibration:
    """The temperature of each head with the least loss, and its coverage.

    Where every position is left out, all of them count after all.
    """
    if not evidence.weights.any():
        evidence = replace(evidence, weights=torch.ones_like(evidence.weights))
    return Calibration(
        tuple(_fit_at(evidence, s, value) for s, value in enumerate(SAMPLING_TEMPERATURES))
    )


def log_probs(evidence: Evidence, calibration: Calibration) -> Tensor:  # [P, K, C]
    """Log-probabilities of each head's best tokens for greedy decoding, coverage included."""
    point = calibration.points[0]
    found = []
    for k, (temperature, coverage) in enumerate(
        zip(point.temperatures, point.coverages, strict=True)
    ):
        normaliser = _normaliser(evidence, k, temperature)
        found.append(evidence.best[:, k] / temperature - normaliser[:, None])
        found[-1] += torch.tensor(coverage).clamp(min=1e-9).log()
    return torch.stack(found, dim=1)


def loss(evidence: Evidence, point: HeadCalibration, *, by_path: bool = True) -> list[float]:
    """[K], mean negative log-likelihood of the true tokens that can be drafted.

    Args:
        by_path: weigh positions as `fit` does, with `point`'s own probabilities.
    """
    s = SAMPLING_TEMPERATURES.index(point.sampling_temperature)
    weights = evidence.weights
    losses = []
    for k, temperature in enumerate(point.temperatures):
        w = weights * evidence.known[:, k]
        covered = evidence.covered[:, k, s]
        normaliser = _normaliser(evidence, k, temperature)
        total = (w * (covered * normaliser - evidence.stated[:, k, s] / temperature)).sum()
        losses.append(float(total / (w * covered).sum().clamp(min=1e-9)))
        if by_path:
            weights = weights * _path_share(evidence, k, temperature, point.coverages[k])
    return losses


def _fit_at(evidence: Evidence, s: int, sampling_temperature: float) -> HeadCalibration:
    weights = evidence.weights
    temperatures: list[float] = []
    coverages: list[float] = []
    for k in range(evidence.known.shape[1]):
        w = weights * evidence.known[:, k]
        covered = evidence.covered[:, k, s]
        tried = torch.tensor(TEMPERATURES)
        # [P, G]
        at = covered[:, None] * evidence.normalisers[:, k] - evidence.stated[:, k, s, None] / tried
        temperature = TEMPERATURES[int((w[:, None] * at).sum(dim=0).argmin())]
        coverage = float((w * covered).sum() / w.sum().clamp(min=1e-9))
        temperatures.append(temperature)
        coverages.append(min(coverage, 1.0))
        weights = weights * _path_share(evidence, k, temperature, coverages[-1])
    return HeadCalibration(sampling_temperature, tuple(temperatures), tuple(coverages))


def _path_share(evidence: Evidence, k: int, temperature: float, coverage: float) -> Tensor:  # [P]
    """The calibrated probability of the greedy token under head k; 0 where there is none."""
    log_p = evidence.truth[:, k] / temperature - _normaliser(evidence, k, temperature)
    return (coverage * log_p.exp()).masked_fill(~evidence.known[:, k], 0.0)


def _normaliser(evidence: Evidence, k: int, temperature: float) -> Tensor:  # [P]
    nearest = min(range(len(TEMPERATURES)), key=lambda g: abs(TEMPERATURES[g] - temperature))
    assert abs(TEMPERATURES[nearest] - temperature) < 1e-6, "a temperature that was tried"
    return evidence.normalisers[:, k, nearest]


def _rows(share: Tensor, first: int, rows: int) -> Tensor:  # [M, V'] -> [rows, V']
    """`rows` rows from `first` on; zeros behind the last one."""
    found = share[first : first + rows]
    missing = share.new_zeros(rows - len(found), share.shape[1])
    return torch.cat([found, missing])
