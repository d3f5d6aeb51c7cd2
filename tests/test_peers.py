"""Other decoders as arms: the same tokens as ours, and a reason where they cannot run."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import EOS, VOCAB
from medusa_cli.bench.arms import Arm, Unavailable, plain_arm
from medusa_cli.bench.peers import PeerSetup, check_peer, peer_arm
from medusa_cli.config import SamplingConfig
from medusa_cli.errors import UsageError
from medusa_cli.models.loader import LoadOptions
from medusa_cli.models.sources import Finder
from medusa_cli.session import Medusa, load

PROMPT = list(b"the cat sat on the mat, the cat sat on")


@pytest.fixture
def model(model_folder: Path) -> Medusa:
    return load(str(model_folder), offline=True)


def setup(sampling: SamplingConfig | None = None, *, ignore_eos: bool = True) -> PeerSetup:
    options = LoadOptions(device="cpu", dtype="float32")
    return PeerSetup(
        sampling or SamplingConfig(seed=3), ignore_eos, Finder(None, offline=True), options
    )


def answer(arm: Arm | Unavailable, tokens: int = 24) -> tuple[list[int], list[int]]:
    """What an arm emits, and how many tokens each step brought."""
    assert not isinstance(arm, Unavailable), arm.reason
    emitted: list[int] = []
    counts: list[int] = []

    def on_step(new: Sequence[int], _accept_length: int, nodes: int = 0) -> None:
        del nodes
        emitted.extend(new)
        counts.append(len(new))

    arm.run(PROMPT, tokens, on_step)
    return emitted, counts


@pytest.mark.parametrize("name", ["hf", "prompt-lookup", "assisted"])
def test_greedy_peers_give_plain_decodings_tokens(model: Medusa, name: str) -> None:
    expected, _ = answer(plain_arm(model, SamplingConfig(seed=3), ignore_eos=True))
    full = f"assisted:{model.name}" if name == "assisted" else name
    got, counts = answer(peer_arm(full, model, setup()))
    assert got == expected
    assert len(got) == 24
    if name == "hf":
        assert counts == [1] * 24
    if name == "assisted":  # its assistant is the model itself: every draft is right
        assert max(counts) > 1


def test_a_peer_ends_where_the_model_ends(model: Medusa) -> None:
    expected, _ = answer(plain_arm(model, SamplingConfig(seed=3), ignore_eos=False), 90)
    got, _ = answer(peer_arm("hf", model, setup(ignore_eos=False)), 90)
    assert got == expected


def test_sampling_peers_repeat_under_a_seed_and_touch_no_global_generator(model: Medusa) -> None:
    import torch

    warm = SamplingConfig(temperature=1.0, top_p=0.9, seed=5)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first, _ = answer(peer_arm("hf", model, setup(warm)))
    assert torch.equal(torch.get_rng_state(), before)
    second, _ = answer(peer_arm("hf", model, setup(warm)))
    other, _ = answer(
        peer_arm("hf", model, setup(SamplingConfig(temperature=1.0, top_p=0.9, seed=6)))
    )
    assert first == second
    assert first != other


def test_compiled_transformers_is_set_up_as_such(model: Medusa) -> None:
    arm = peer_arm("hf-compile", model, setup())
    assert not isinstance(arm, Unavailable)
    config = arm.config  # type: ignore[attr-defined]
    assert config["cache_implementation"] == "static"
    assert config["compile_config"]._compile_all_devices


@pytest.mark.parametrize(
    "name", ["", "vllm", "hf:x", "assisted", "assisted:", "prompt-lookup:3", "llama-cpp-python"]
)
def test_unknown_peers_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--against must be one of hf"):
        check_peer(name)


@pytest.mark.parametrize(
    "name", ["hf", "hf-compile", "prompt-lookup", "assisted:x", "llama-cpp", "llama-cpp:a.gguf"]
)
def test_known_peers(name: str) -> None:
    check_peer(name)


def test_an_assistant_that_is_not_there_is_a_reason(model: Medusa) -> None:
    arm = peer_arm("assisted:nobody", model, setup())
    assert isinstance(arm, Unavailable)
    assert "nobody" in arm.reason


@dataclass
class FakeLlama:
    """Counts up from the prompt's length, and notes how it was called."""

    path: str
    options: dict[str, Any]
    calls: list[Any] = field(default_factory=list)

    def n_vocab(self) -> int:
        return VOCAB

    def reset(self) -> None:
        self.calls.append("reset")

    def set_seed(self, seed: int) -> None:
        self.calls.append(("seed", seed))

    def generate(self, tokens: list[int], **sampling: float) -> Iterator[int]:
        assert tokens == PROMPT
        self.calls.append(sampling)
        yield from range(EOS - 5, VOCAB)


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> list[FakeLlama]:
    made: list[FakeLlama] = []

    def llama(path: str, **options: Any) -> FakeLlama:
        made.append(FakeLlama(path, options))
        return made[-1]

    module = ModuleType("llama_cpp")
    module.Llama = llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    return made


def test_llama_cpp_runs_on_the_gguf_file_beside_the_model(
    model: Medusa, model_folder: Path, llama_cpp: list[FakeLlama]
) -> None:
    (model_folder / "tiny.gguf").touch()
    arm = peer_arm("llama-cpp", model, setup(ignore_eos=False))
    got, _ = answer(arm)
    assert got == list(range(EOS - 5, EOS + 1)), "up to the end token"
    assert llama_cpp[0].path == str(model_folder / "tiny.gguf")
    assert llama_cpp[0].calls[0] == "reset", "no rows of an earlier prompt are kept"
    assert llama_cpp[0].calls[2]["temp"] == 0


def test_llama_cpp_without_a_file_is_a_reason(
    model: Medusa, tmp_path: Path, llama_cpp: list[FakeLlama]
) -> None:
    arm = peer_arm("llama-cpp", model, setup())
    assert isinstance(arm, Unavailable)
    assert "no GGUF file" in arm.reason
    named = peer_arm(f"llama-cpp:{tmp_path / 'no.gguf'}", model, setup())
    assert isinstance(named, Unavailable)
    assert not llama_cpp


def test_llama_cpp_that_is_not_installed_is_a_reason(
    model: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    arm = peer_arm("llama-cpp", model, setup())
    assert isinstance(arm, Unavailable)
    assert "pip install llama-cpp-python" in arm.reason


def test_a_gguf_file_of_another_model_is_refused(
    model: Medusa, model_folder: Path, llama_cpp: list[FakeLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    del llama_cpp
    (model_folder / "tiny.gguf").touch()
    monkeypatch.setattr(FakeLlama, "n_vocab", lambda _self: VOCAB + 1)
    arm = peer_arm("llama-cpp", model, setup())
    assert isinstance(arm, Unavailable)
    assert "another model" in arm.reason


def test_a_gguf_file_that_does_not_load_is_a_reason(
    model: Medusa, model_folder: Path, llama_cpp: list[FakeLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: FakeLlama) -> int:
        raise ValueError("Failed to load model from file")

    del llama_cpp
    (model_folder / "tiny.gguf").touch()
    monkeypatch.setattr(FakeLlama, "n_vocab", broken)
    arm = peer_arm("llama-cpp", model, setup())
    assert arm == Unavailable("llama-cpp", "Failed to load model from file")
