"""From loaded heads to their adaptive tree and the drafting of a generation.

An adaptive tree needs the heads' calibration and what steps cost on this machine.
"""

import time

import torch

from medusa_cli.config import SamplingConfig
from medusa_cli.decoding.adaptive import CANDIDATES, AdaptiveDrafting, AnyTree, AutoTree
from medusa_cli.decoding.calibration import Calibration, uncalibrated
from medusa_cli.decoding.drafting import Drafting, StaticDrafting, plain_drafting
from medusa_cli.decoding.lookup import Lookup
from medusa_cli.decoding.measured import Subject, load_calibration, subject
from medusa_cli.decoding.step_cost import StepCosts, cost_key, load_costs, save_costs
from medusa_cli.decoding.step_timing import measure_costs
from medusa_cli.decoding.tree import Tree
from medusa_cli.errors import CheckpointError, StorageError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.heads import Heads
from medusa_cli.models.progress import Report, Stage, silent


def heads_subject(model: str, heads: Heads) -> Subject | None:
    """What results of heads belong to; None for heads that do not lie in files.

    Args:
        model: name of the base model as the user gave it.
    """
    if heads.info.files is None:
        return None
    return subject(heads.info.name, model, heads.info.files)


def is_calibrated(model: str, heads: Heads, report: Report = silent) -> bool:
    """Whether heads on a base model have a calibration.

    Raises:
        CheckpointError: it is damaged.
    """
    return _kept_calibration(model, heads, report) is not None


def auto_tree(
    model: str, base: BaseModel, heads: Heads, static: Tree, report: Report = silent
) -> AutoTree:
    """The adaptive tree of heads; step costs that nobody has measured yet are measured now.

    Heads without calibration are taken at their word, until decoding shows better.

    Args:
        model: name of the base model as the user gave it.
        static: the fixed tree in whose place it stands.

    Raises:
        CheckpointError: the calibration is damaged.
    """
    calibration = _kept_calibration(model, heads, report)
    if calibration is None:
        report(
            Stage(
                f"heads {heads.info.name} are not calibrated: `medusa accuracy` measures what "
                "their probabilities are worth"
            )
        )
        calibration = uncalibrated(heads.info.num_heads)
    costs = step_costs(base, heads, report)
    return AutoTree(calibration, costs, heads.info.num_heads, static)


def fresh_drafting(
    heads: Heads | None,
    tree: AnyTree,
    sampling: SamplingConfig,
    device: torch.device,
    lookup: bool | None,
) -> Drafting:
    """The drafting of one generation.

    Args:
        heads: None decodes plainly.
        lookup: whether a lookup branch joins the tree; None: the adaptive tree only.
    """
    if heads is None:
        return plain_drafting(device)
    if isinstance(tree, AutoTree):
        branch = None if lookup is False else Lookup()
        return AdaptiveDrafting(heads, tree, sampling.temperature, device, branch)
    return StaticDrafting(heads, tree, device, Lookup() if lookup else None)


def step_costs(base: BaseModel, heads: Heads, report: Report = silent) -> StepCosts:
    """The kept step costs of heads on this machine; measured and kept where there are none."""
    try:
        kept = load_costs(cost_key(base, heads.info))
    except CheckpointError:
        kept = None  # it is replaced
    return refresh_costs(base, heads, report) if kept is None else kept


def refresh_costs(base: BaseModel, heads: Heads, report: Report = silent) -> StepCosts:
    """Measures step costs and keeps them."""
    started = time.perf_counter()
    report(Stage("measuring what steps cost on this machine, once, for a few seconds"))
    candidates = min(CANDIDATES, heads.info.vocabulary)
    key = cost_key(base, heads.info)
    costs = measure_costs(base, heads, heads.info.num_heads, candidates, key)
    try:
        path = save_costs(costs)
        report(Stage(f"step costs kept in {path} after {time.perf_counter() - started:.1f} s"))
    except StorageError as error:
        report(Stage(f"step costs are not kept: {error}"))
    return costs


def _kept_calibration(model: str, heads: Heads, report: Report) -> Calibration | None:
    of = heads_subject(model, heads)
    found = None if of is None else load_calibration(of, report)
    fits = found is not None and len(found.points[0].temperatures) == heads.info.num_heads
    return found if fits else None
