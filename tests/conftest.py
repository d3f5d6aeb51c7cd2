"""Tiny models, a byte tokenizer and scripted drafters that the tests share."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.heads import Candidates, Head

# Tiny tensors: threads only get in each other's way.
torch.set_num_threads(1)

VOCAB = 260  # 256 bytes and four special tokens
EOS = 257
HIDDEN = 32
CONTEXT = 128
WINDOW = 12

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # wide: greedy choices differ from place to place
    "bos_token_id": 256,
    "eos_token_id": EOS,
}


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **_SIZES))


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=WINDOW, **_SIZES))


def _qwen2() -> PreTrainedModel:
    """Layers of both kinds: the second one has a sliding window."""
    config = Qwen2Config(
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        **_SIZES,
    )
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    return Qwen2ForCausalLM(config)


def _gpt_neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES))


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gpt_neox": _gpt_neox,
}


def tiny_module(architecture: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random model, the same for the same seed."""
    torch.manual_seed(seed)
    return ARCHITECTURES[architecture]().eval()


def tiny_base(architecture: str = "llama", seed: int = 0) -> BaseModel:
    """A random model behind our interface."""
    return BaseModel(tiny_module(architecture, seed))


@pytest.fixture(params=sorted(ARCHITECTURES))
def base(request: pytest.FixtureRequest) -> BaseModel:
    """One tiny model of each architecture in turn."""
    return tiny_base(request.param)


@pytest.fixture
def llama() -> BaseModel:
    """A tiny Llama."""
    return tiny_base()


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters outside ASCII are split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    special = {"<s>": 256, "</s>": 257, "<|user|>": 258, "<|assistant|>": 259}
    tokenizer = Tokenizer(BPE(vocab=vocabulary | special, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    fast.chat_template = chat_template
    return fast


def _byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    code = ord(char)
    return others[code - 256] if code >= 256 else code


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer without a chat template."""
    return byte_tokenizer()


def head_tensors(
    heads: int,
    layers: int = 1,
    *,
    lm_head: bool = True,
    conditioned: bool = False,
    rows: int = VOCAB,
) -> dict[str, Tensor]:
    """Random head tensors under the names of the official layout."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {}
    for h in range(heads):
        for layer in range(layers):
            tensors[f"{h}.{layer}.linear.weight"] = random(HIDDEN, HIDDEN)
            tensors[f"{h}.{layer}.linear.bias"] = random(HIDDEN)
        if conditioned:
            tensors[f"{h}.input.weight"] = random(HIDDEN, 2 * HIDDEN)
            tensors[f"{h}.input.bias"] = random(HIDDEN)
        if lm_head:
            tensors[f"{h}.{layers}.weight"] = random(rows, HIDDEN)
    return tensors


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny Llama with tokenizer, chat template and v1 heads, as files.

    `all.json` is a tree of every single token: its steps always accept one draft.
    """
    from safetensors.torch import save_file

    folder = tmp_path / "tiny"
    tiny_module().save_pretrained(folder)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(folder)
    save_file(head_tensors(4), folder / "medusa_lm_head.safetensors")
    (folder / "all.json").write_text(json.dumps({"name": "all", "dense": [VOCAB]}))
    return folder


class _Sure:
    """States probabilities for what `propose` gives: each candidate half as likely as the last."""

    def propose(self, hidden: Tensor, pending: Tensor, heads: int, candidates: int) -> Tensor:
        raise NotImplementedError

    def score(
        self, hidden: Tensor, pending: Tensor, temperatures: Sequence[float], candidates: int
    ) -> Candidates:
        tokens = self.propose(hidden, pending, len(temperatures), candidates)
        shares = 0.9 * torch.tensor([0.5**rank for rank in range(1, candidates + 1)], device="cpu")
        return Candidates(tokens, shares.log().expand(len(temperatures), -1))


@dataclass
class ScriptedDrafter(_Sure):
    """Proposes by script instead of from heads.

    Attributes:
        cache: tells how far the text has come.
        truth: the whole text that greedy decoding gives.
        rank: where among the candidates the true token stands; None: never among them.
    """

    cache: KVCache
    truth: Sequence[int]
    rank: int | None

    def propose(self, hidden: Tensor, pending: Tensor, heads: int, candidates: int) -> Tensor:
        """Distinct tokens for each head, the true one at `rank`."""
        del hidden, pending
        behind = len(self.cache.ids) + 1
        rows = []
        for k in range(heads):
            position = behind + k
            true = self.truth[position] if position < len(self.truth) else 0
            row = [t for t in range(1, candidates + 2) if t != true][:candidates]
            if self.rank is not None:
                row[min(self.rank, candidates - 1)] = true
            rows.append(row)
        return torch.tensor(rows, device="cpu")  # whatever the default device is


@dataclass
class RandomDrafter(_Sure):
    """Proposes distinct random tokens."""

    generator: torch.Generator

    def propose(self, hidden: Tensor, pending: Tensor, heads: int, candidates: int) -> Tensor:
        """Distinct tokens for each head."""
        del hidden, pending
        rows = [torch.randperm(VOCAB, generator=self.generator)[:candidates] for _ in range(heads)]
        return torch.stack(rows)


def make_head(layers: int = 1, *, conditioned: bool = False, rows: int | None = None) -> Head:
    """A random head module."""
    torch.manual_seed(3)
    return Head(HIDDEN, layers, conditioned, rows)
