"""`--compile`: torch.compile for the repeated layers of a model that torch computes."""

import torch
from torch import nn

from medusa_cli.errors import MedusaError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.progress import Report, Stage

# Rows of the warm-up, none of them a size of a model: torch takes sizes that happen to be equal
# for always equal, and compiles again when they are not.
PROMPT, TREES = 37, (1, 11, 5, 1)


def compile_layers(base: BaseModel, report: Report, backend: str = "inductor") -> None:
    """Compiles the decoder layers of a model in place, once for all of them, and runs them.

    Row counts and the length of the context stay variable: a step compiles nothing anew.

    Args:
        backend: torch's name of what compiles.

    Raises:
        MedusaError: there is no compiler here, or it cannot take the model.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # a layer knows its own number
    report(Stage("compiling the model's layers"))
    for layer in _layers(base.module):
        layer.compile(dynamic=True, backend=backend)
    try:
        _warm_up(base)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise MedusaError(f"--compile failed: {reason}\nDrop --compile.") from error
    base.engine.name = "torch, compiled"  # its steps cost something else


def _layers(module: nn.Module) -> list[nn.Module]:
    """The modules of the longest list of modules: a decoder's layers, each called as one."""
    lists = [list(child) for child in module.modules() if isinstance(child, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _warm_up(base: BaseModel) -> None:
    """A prompt, plain steps, and trees of two sizes."""
    ids = torch.arange(PROMPT + max(TREES), device=base.device) % base.vocab_size
    cache = KVCache()
    base.prefill(ids[:PROMPT], cache)
    cache.append(ids[:PROMPT].tolist())
    for nodes in TREES:
        star = torch.arange(nodes, device=base.device)  # a root and its children
        paths = torch.stack([star * 0, star], dim=1)
        base.verify(ids[:nodes], star.clamp(max=1), paths, cache)
        cache.accept([0], [int(ids[0])])
