"""`--compile`: the layers that torch computes are compiled once, for all steps."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from conftest import CONTEXT, tiny_base
from medusa_cli.cli.app import app
from medusa_cli.decoding.tree_buffers import shape_buffers
from medusa_cli.errors import MedusaError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.compiling import compile_layers
from medusa_cli.models.progress import silent


def _verified(base: BaseModel, prompt: int, parents: list[int]) -> torch.Tensor:
    """Logits of a small tree behind a prompt."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (prompt + len(parents),), generator=generator)
    cache = KVCache()
    base.prefill(ids[:prompt], cache)
    cache.append(ids[:prompt].tolist())
    tree = shape_buffers(parents, base.device)
    return base.verify(ids[prompt:], tree.depths, tree.paths, cache).logits


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_compiled_layers_give_the_same_logits_and_compile_nothing_anew(architecture: str) -> None:
    stock, compiled = tiny_base(architecture), tiny_base(architecture)
    compile_layers(compiled, silent, backend="aot_eager")
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert frames > 0
    assert compiled.engine.name != stock.engine.name, "they share no table of step costs"
    for prompt, parents in ((20, [-1, 0, 0, 1, 1, 3]), (CONTEXT // 2, [-1, 0, 1]), (7, [-1])):
        wanted = _verified(stock, prompt, parents)
        torch.testing.assert_close(
            _verified(compiled, prompt, parents), wanted, atol=1e-4, rtol=1e-4
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames


def test_what_cannot_be_compiled_is_said(llama: BaseModel) -> None:
    def broken(*_arguments: object) -> None:
        raise RuntimeError("no compiler here\nmore about it")

    with pytest.raises(MedusaError, match="--compile failed: .*\nDrop --compile") as caught:
        compile_layers(llama, silent, backend=broken)
    assert len(str(caught.value).splitlines()) == 2


def test_the_cpu_engine_has_nothing_to_compile(model_folder: Path) -> None:
    command = ["generate", "-m", str(model_folder), "-p", "Hi", "--device", "cpu", "--compile"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "--compile has nothing to do here" in done.stderr
