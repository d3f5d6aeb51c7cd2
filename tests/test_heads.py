"""Heads: the arithmetic of each kind, and separate weights for separate layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from conftest import HIDDEN, VOCAB, make_head
from medusa_cli.models.heads import Head, HeadKind, Heads, HeadsInfo


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def bound_heads(heads: list[Head], draft_ids: torch.Tensor | None = None) -> Heads:
    torch.manual_seed(5)
    kind = HeadKind.MEDUSA if heads[0].input is None else HeadKind.CONDITIONED
    rows = VOCAB if draft_ids is None else len(draft_ids)
    info = HeadsInfo("test", kind, len(heads), len(heads[0].layers), rows)
    lm_head = nn.Linear(HIDDEN, rows, bias=False).requires_grad_(False)
    modules = nn.ModuleList(heads).requires_grad_(False)
    return Heads(info, modules, nn.Embedding(VOCAB, HIDDEN), lm_head, draft_ids)


def test_medusa_head_by_hand() -> None:
    head = make_head(layers=2, rows=5)
    x = torch.randn(HIDDEN)
    expected = x
    for layer in head.layers:
        weight, bias = layer.linear.weight, layer.linear.bias
        expected = expected + silu(weight @ expected + bias)
    torch.testing.assert_close(head(x, None), expected)


def test_conditioned_head_by_hand() -> None:
    """Input order: hidden state, then embedding of the pending token."""
    head = make_head(conditioned=True)
    hidden, embedding = torch.randn(HIDDEN), torch.randn(HIDDEN)
    weight, bias = head.input.weight, head.input.bias
    by_hand = weight[:, :HIDDEN] @ hidden + weight[:, HIDDEN:] @ embedding + bias
    x = hidden + silu(by_hand)
    linear = head.layers[0].linear
    expected = x + functional.silu(functional.linear(x, linear.weight, linear.bias))
    torch.testing.assert_close(head(hidden, embedding), expected)


def test_residual_layers_have_storage_and_gradients_of_their_own() -> None:
    head = make_head(layers=3, rows=4)
    pointers = {parameter.data_ptr() for parameter in head.parameters()}
    assert len(pointers) == len(list(head.parameters())) == 3 * 2 + 1
    head.lm_head(head(torch.randn(HIDDEN), None)).sum().backward()
    gradients = [layer.linear.weight.grad for layer in head.layers]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert not torch.allclose(gradients[0], gradients[1])


@pytest.mark.parametrize("own_lm_head", [True, False])
def test_candidates_are_the_best_logits_best_first(own_lm_head: bool) -> None:
    heads = bound_heads([make_head(rows=VOCAB if own_lm_head else None) for _ in range(3)])
    hidden, pending = torch.randn(HIDDEN), torch.tensor(3)
    logits = heads.logits(hidden, pending, 2)
    assert logits.shape == (2, VOCAB)
    proposed = heads.propose(hidden, pending, 2, 4)
    for k in range(2):
        best = sorted(range(VOCAB), key=lambda token: -logits[k, token])[:4]
        assert proposed[k].tolist() == best


def test_draft_vocabulary_maps_to_the_models_ids() -> None:
    draft_ids = torch.tensor([200, 7, 99, 150])
    heads = bound_heads([make_head(conditioned=True)], draft_ids)
    proposed = heads.propose(torch.randn(HIDDEN), torch.tensor(3), 1, 4)
    assert sorted(proposed[0].tolist()) == sorted(draft_ids.tolist())
    order = heads.logits(torch.randn(HIDDEN), torch.tensor(3), 1)
    assert order.shape == (1, 4)


def test_conditioned_drafts_depend_on_the_pending_token() -> None:
    heads = bound_heads([make_head(conditioned=True)])
    hidden = torch.randn(HIDDEN)
    one, other = (heads.logits(hidden, torch.tensor(token), 1) for token in (3, 4))
    assert not torch.allclose(one, other)
