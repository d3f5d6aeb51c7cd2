"""Arms of other decoders on the same weights: transformers' own modes and llama.cpp."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_cli.bench.arms import Arm, ArmInfo, ArmKind, OnStep, Unavailable
from medusa_cli.config import SamplingConfig
from medusa_cli.errors import UsageError
from medusa_cli.models.loader import LoadOptions, load_base, load_tokenizer
from medusa_cli.models.sources import Finder
from medusa_cli.session import Medusa

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEERS = ("hf", "hf-compile", "prompt-lookup", "assisted:MODEL", "llama-cpp[:FILE.gguf]")
_PEER = re.compile(r"hf|hf-compile|prompt-lookup|assisted:.+|llama-cpp(:.+)?")
LOOKUP_TOKENS = 10  # the value in transformers' own documentation of prompt lookup
LLAMA_CPP_CONTEXT = 8192  # its KV cache is allocated at once
# Fields of `SamplingConfig` that transformers' `GenerationConfig` has under the same names.
_WARPERS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "eta_cutoff", "epsilon_cutoff",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What all peers of one benchmark share.

    Attributes:
        sampling: how tokens are drawn.
        ignore_eos: go on after end tokens.
        finder: finds assistant models.
        options: how to load them.
        stock: the model as transformers makes it; None: as it is loaded already.
    """

    sampling: SamplingConfig
    ignore_eos: bool
    finder: Finder
    options: LoadOptions
    stock: "PreTrainedModel | None" = None

    def with_stock(self, model: Medusa) -> "PeerSetup":
        """The setup for a model that an engine has changed: with an unchanged one beside it."""
        source = self.finder.find(model.name, plain=True)
        options = replace(self.options, stock=True)
        return replace(self, stock=load_base(source, options, self.finder.report).module)


def check_peer(name: str) -> None:
    """Raises `UsageError` when there is no peer of that name."""
    if _PEER.fullmatch(name) is None:
        raise UsageError(f"--against must be one of {', '.join(PEERS)}, not '{name}'")


def needs_stock(name: str) -> bool:
    """Whether a peer is a mode of transformers, to be compared on transformers' own modules."""
    return not name.startswith("llama-cpp")


def peer_arm(name: str, model: Medusa, setup: PeerSetup) -> Arm | Unavailable:
    """The peer of that name, or why it cannot run here."""
    kind, _, argument = name.partition(":")
    try:
        match kind:
            case "hf":
                return _generate_arm(name, model, setup, "transformers generate")
            case "hf-compile":
                return _compiled_arm(name, model, setup)
            case "prompt-lookup":
                about = f"transformers prompt lookup, {LOOKUP_TOKENS} tokens"
                extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
                return _generate_arm(name, model, setup, about, extra)
            case "assisted":
                return _assisted_arm(name, argument, model, setup)
            case _:
                return _llama_cpp_arm(name, argument, model, setup)
    except Exception as error:  # noqa: BLE001  # whatever a peer's library raises: it is reported
        return Unavailable(name, str(error) or type(error).__name__)


@dataclass(frozen=True, slots=True)
class GenerateArm:
    """transformers' `generate` in one of its modes."""

    info: ArmInfo
    module: "PreTrainedModel"
    config: dict[str, Any]
    speculative: bool
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int, on_step: OnStep) -> None:
        """Decodes one prompt on an empty cache, up to an end token or the limit."""
        from transformers import GenerationConfig, StoppingCriteriaList

        config = GenerationConfig(max_new_tokens=max_new_tokens, **self.config)
        device = self.module.get_input_embeddings().weight.device
        ids = torch.tensor([list(prompt_ids)], device=device)  # [1, S]
        told = len(prompt_ids)

        def after_step(input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
            nonlocal told
            new = input_ids[0, told:].tolist()
            on_step(new, len(new) if self.speculative and told > len(prompt_ids) else 0)
            told += len(new)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(self.info.sampling.seed)
            self.module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([after_step]),
                **self.arguments,
            )


@dataclass(frozen=True, slots=True)
class LlamaCppArm:
    """llama.cpp through its Python binding, on a GGUF file of the same model."""

    info: ArmInfo
    llama: Any
    eos_ids: frozenset[int]

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int, on_step: OnStep) -> None:
        """Decodes one prompt on an empty cache, up to an end token or the limit."""
        sampling = self.info.sampling
        self.llama.reset()
        self.llama.set_seed(sampling.seed & 0x7FFFFFFF)
        tokens = self.llama.generate(
            list(prompt_ids),
            temp=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repeat_penalty=sampling.repetition_penalty,
        )
        for count, token in enumerate(tokens, start=1):
            on_step([token], 0)
            if count == max_new_tokens or token in self.eos_ids:
                return


def _generate_arm(
    name: str,
    model: Medusa,
    setup: PeerSetup,
    about: str,
    config: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
) -> GenerateArm:
    sampling = setup.sampling
    eos = sorted(model.eos_ids)
    settings: dict[str, Any] = {
        "do_sample": sampling.temperature > 0,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": None if setup.ignore_eos else eos,
        "pad_token_id": eos[0] if eos else 0,
    }
    if sampling.temperature > 0:
        settings |= {warper: getattr(sampling, warper) for warper in _WARPERS}
    if setup.stock is not None:
        about = f"{about}, {str(setup.stock.dtype).removeprefix('torch.')}"
    info = ArmInfo(name, ArmKind.PEER, about, sampling, comparable=sampling.temperature == 0)
    speculative = config is not None or arguments is not None
    module = setup.stock or model.base.module
    return GenerateArm(info, module, settings | (config or {}), speculative, arguments or {})


def _compiled_arm(name: str, model: Medusa, setup: PeerSetup) -> Arm | Unavailable:
    from transformers import CompileConfig

    if model.base.device.type == "mps":
        return Unavailable(name, "transformers does not compile on MPS: leave this arm out")
    compiling = CompileConfig(mode="default")
    compiling._compile_all_devices = True  # the one way to have `generate` compile on a CPU too
    config = {"cache_implementation": "static", "compile_config": compiling}
    arm = _generate_arm(name, model, setup, "transformers, static cache, compiled", config)
    return replace(arm, speculative=False)


def _assisted_arm(name: str, assistant: str, model: Medusa, setup: PeerSetup) -> Arm | Unavailable:
    source = setup.finder.find(assistant, plain=True)
    tokenizer = load_tokenizer(source, setup.options)
    arguments: dict[str, Any] = {
        "assistant_model": load_base(
            source, replace(setup.options, stock=True), setup.finder.report
        ).module
    }
    if tokenizer.get_vocab() != model.tokenizer.get_vocab():
        arguments |= {"tokenizer": model.tokenizer, "assistant_tokenizer": tokenizer}
    about = f"transformers assisted generation with {assistant}"
    return _generate_arm(name, model, setup, about, arguments=arguments)


def _llama_cpp_arm(name: str, file: str, model: Medusa, setup: PeerSetup) -> Arm | Unavailable:
    try:
        from llama_cpp import Llama
    except ImportError:
        return Unavailable(name, "llama-cpp-python is not installed: pip install llama-cpp-python")
    folder = Path(model.base.module.name_or_path)
    path = Path(file) if file else next(iter(sorted(folder.glob("*.gguf"))), None)
    if path is None or not path.is_file():
        where = f"no file {path}" if path else f"no GGUF file in {folder}"
        return Unavailable(name, f"{where}: give one as llama-cpp:FILE.gguf")
    if setup.sampling.eta_cutoff > 0 or setup.sampling.epsilon_cutoff > 0:
        return Unavailable(name, "llama.cpp has no eta or epsilon cut-off")
    threads, on_gpu = torch.get_num_threads(), model.base.device.type != "cpu"
    llama = Llama(
        str(path),
        n_ctx=min(model.base.context_length or LLAMA_CPP_CONTEXT, LLAMA_CPP_CONTEXT),
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=-1 if on_gpu else 0,
        verbose=False,
    )
    if llama.n_vocab() != model.base.vocab_size:
        reason = f"{path} has {llama.n_vocab()} tokens, the model {model.base.vocab_size}"
        return Unavailable(name, f"{reason}: it is another model")
    info = ArmInfo(
        f"llama-cpp:{path.name}" if file else name,
        ArmKind.PEER,
        f"llama.cpp on {path.name}, {threads} threads",
        setup.sampling,
        comparable=setup.sampling.temperature == 0,
    )
    return LlamaCppArm(info, llama, frozenset() if setup.ignore_eos else model.eos_ids)
