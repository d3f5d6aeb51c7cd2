"""Acceptance rules: pure functions from verified logits to the longest good path.

`walk` serves greedy and lossless decoding: it follows the base model's own choices down the tree,
so what it emits is what plain decoding would emit. `typical` is the paper's lossy rule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.config import Acceptance
from medusa_cli.decoding.sampling import Sampler, typical_set
from medusa_cli.decoding.tree_buffers import TreeBuffers


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification accepted, still on the device.

    Attributes:
        path: node numbers from the root, [A + 1], or longer: only the first A + 1 count.
        drafts: [], A, the number of accepted drafts.
        next_token: [], the base model's choice behind the path's last node.
    """

    path: Tensor
    drafts: Tensor
    next_token: Tensor


def accept(
    logits: Tensor,  # [N, V]
    tokens: Tensor,  # [N]
    tree: TreeBuffers,
    sampler: Sampler,
    context: Tensor | None,  # [L], the tokens before the root; None unless the sampler needs it
    position: int,  # of the token that follows the root
) -> Verdict:
    """Applies the sampler's acceptance rule to one verified tree."""
    rule = typical if sampler.config.acceptance is Acceptance.TYPICAL else walk
    return rule(logits, tokens, tree, sampler, context, position)


def walk(
    logits: Tensor,  # [N, V]
    tokens: Tensor,  # [N]
    tree: TreeBuffers,
    sampler: Sampler,
    context: Tensor | None,  # [L]
    position: int,
) -> Verdict:
    """Follows the base model's choice at each node to the child that holds it, if there is one.

    Only rows that the walk visits are warped. On an accelerator it makes a fixed number of rounds
    without a host read; on a CPU, where reading is free, it ends at the first miss.
    """
    node = tokens.new_zeros(1)
    path, drafts = [node], tokens.new_zeros(())
    alive = torch.ones((), dtype=torch.bool, device=tokens.device)
    next_token = tokens[0]
    for depth in range(tree.depth + 1):
        prefix = _prefixes(context, tokens, torch.stack(path, dim=1))
        choice = sampler.choose(logits.index_select(0, node), prefix, position + depth)
        next_token = torch.where(alive, choice, next_token)
        match = (tree.parents == node) & (tokens == choice)  # [N], at most one is True
        alive = alive & match.any()
        if depth == tree.depth or (tokens.device.type == "cpu" and not alive):
            break
        node = torch.where(alive, match.int().argmax(), node)
        path.append(node)
        drafts = drafts + alive
    return Verdict(torch.cat(path), drafts, next_token)


def typical(
    logits: Tensor,  # [N, V]
    tokens: Tensor,  # [N]
    tree: TreeBuffers,
    sampler: Sampler,
    context: Tensor | None,  # [L]
    position: int,
) -> Verdict:
    """Accepts every draft in its parent's typical set; of the longest paths takes the likeliest.

    Level by level, so that on a CPU only rows behind accepted nodes are warped.

    Source: Cai et al. 2024, arXiv 2401.10774, section 2.3.1.
    """
    # Log-probability of each node's path; -inf where a token on it was rejected.
    log_p = torch.full(tokens.shape, -torch.inf, device=tokens.device)  # [N]
    log_p[0] = 0
    for depth in range(tree.depth):
        rows = torch.arange(*tree.level(depth), device=tokens.device)  # [R]
        if tokens.device.type == "cpu":
            rows = rows[log_p[rows] > -torch.inf]
            if len(rows) == 0:
                break
        prefixes = _prefixes(context, tokens, tree.paths[rows, : depth + 1])
        warped = sampler.warp(logits[rows], prefixes)
        kept = typical_set(warped, sampler.config)  # [R, V]
        step = warped.scores.log_softmax(dim=-1).masked_fill(~kept, -torch.inf)
        children = slice(*tree.level(depth + 1))
        parents = tree.parents[children]  # [M]
        row_of = torch.searchsorted(rows, parents).clamp(max=len(rows) - 1)  # [M]
        gained = step[row_of, tokens[children]].masked_fill(rows[row_of] != parents, -torch.inf)
        log_p[children] = log_p[parents] + gained
    depths = torch.where(log_p > -torch.inf, tree.depths, -1)  # [N]
    drafts = depths.max()
    last = torch.where(depths == drafts, log_p, -torch.inf).argmax()
    path = tree.paths[last]  # [depth + 1]
    if context is not None:
        path = path[: int(drafts) + 1]  # host sync, with prefix processors only
    prefix = _prefixes(context, tokens, path[None])
    choice = sampler.choose(logits[last][None], prefix, position + drafts)
    return Verdict(path, drafts, choice)


def _prefixes(context: Tensor | None, tokens: Tensor, paths: Tensor) -> Tensor | None:
    """The tokens that lead to the end of each of R paths of equal length: [R, L + depth + 1]."""
    if context is None:
        return None
    return torch.cat([context.expand(len(paths), -1), tokens[paths]], dim=1)
