"""`Medusa`: a loaded model with its heads, ready to generate. The command line is built on it."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from medusa_cli.config import Limits, SamplingConfig
from medusa_cli.decoding.adaptive import AUTO, AnyTree, AutoTree
from medusa_cli.decoding.auto_tree import auto_tree, fresh_drafting, is_calibrated
from medusa_cli.decoding.decode import Budget, DecodeStep, decode
from medusa_cli.decoding.sampling import Sampler
from medusa_cli.decoding.tree import ROOT_ONLY, Tree, load_tree
from medusa_cli.models import registry
from medusa_cli.models.base import BaseModel, eos_ids
from medusa_cli.models.cache import KVCache
from medusa_cli.models.checkpoint import load_heads
from medusa_cli.models.heads import Heads
from medusa_cli.models.loader import LoadOptions, load_base, load_tokenizer
from medusa_cli.models.progress import Report, silent
from medusa_cli.models.sources import Finder, Source
from medusa_cli.text.detokenizer import Detokenizer
from medusa_cli.text.events import Event, Result, Started, Step, text_steps
from medusa_cli.text.prompt_files import Question
from medusa_cli.text.prompts import (
    Message,
    encode_chat,
    encode_raw,
    fit_context,
    shipped_template,
)
from medusa_cli.text.stops import StopFilter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[Message] | Sequence[int]
SILENT_STEPS = 16  # steps without one accepted draft, after which the user is warned


def load(
    model: str = registry.DEFAULT_MODEL,
    *,
    heads: str | None = None,
    tree: str | None = None,
    lookup: bool | None = None,
    plain: bool = False,
    options: LoadOptions | None = None,
    revision: str | None = None,
    offline: bool = False,
    report: Report = silent,
) -> "Medusa":
    """Loads a base model and its heads.

    Args:
        model: alias, hub id or directory.
        heads: alias, hub id, directory or file; by default the model's own.
        tree: `auto`, name of a shipped tree, or a JSON file; by default `auto` for heads that
            are calibrated, else a shipped one that suits the device.
        lookup: draft also what followed the last tokens earlier in the text; by default with the
            adaptive tree only.
        plain: load no heads and decode one token per forward.
        options: device, precision and whether to trust the model's code.
        revision: of the base model's hub repository.
        offline: open no connection.
        report: hears what is being done.

    Raises:
        MedusaError: with what is missing or does not fit, and what to do.
    """
    options = options or LoadOptions()
    chosen = None if plain or tree in (None, AUTO) else load_tree(tree)
    source = Finder(revision, offline, report).find(model, heads, plain=plain)
    tokenizer = load_tokenizer(source, options)
    base = load_base(source, options, report)
    template = None
    if source.entry.template is not None and tokenizer.chat_template is None:
        template = shipped_template(source.entry.template)
    if source.heads is None:
        return Medusa(model, base, tokenizer, None, ROOT_ONLY, template)
    loaded = load_heads(source.heads, base, source.heads_name or model)
    static = chosen or _default_tree(source, base, loaded)
    static.check_heads(loaded.info.num_heads, loaded.info.vocabulary)
    used: AnyTree = static
    if tree == AUTO or (tree is None and is_calibrated(model, loaded, report)):
        used = auto_tree(model, base, loaded, static, report)
    return Medusa(model, base, tokenizer, loaded, used, template, lookup)


def _default_tree(source: Source, base: BaseModel, heads: Heads) -> Tree:
    """The heads' own tree, or the registry's for this device, cut to what the heads can draft."""
    entry = source.entry
    for_device = entry.small_tree if base.device.type == "cpu" else entry.tree
    return load_tree(heads.info.tree or for_device).limited(heads.info.num_heads)


@dataclass(frozen=True, slots=True)
class Medusa:
    """A base model, its tokenizer, its heads and the tree that they draft.

    Attributes:
        name: as the user gave it.
        base: the base model.
        tokenizer: its tokenizer.
        heads: None when decoding plainly.
        tree: the root alone when decoding plainly.
        template: chat template that replaces the tokenizer's; None keeps that.
        lookup: whether lookup branches join the tree; None: those of the adaptive tree only.
    """

    name: str
    base: BaseModel
    tokenizer: "PreTrainedTokenizerBase"
    heads: Heads | None
    tree: AnyTree
    template: str | None = None
    lookup: bool | None = None

    @property
    def has_template(self) -> bool:
        """Whether prompts can be rendered as a conversation."""
        return self.template is not None or self.tokenizer.chat_template is not None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the union of what model and tokenizer name."""
        return self.base.eos_ids | eos_ids(self.tokenizer)

    def sampling_defaults(self) -> dict[str, float]:
        """The sampling values of the model's `generation_config`, by `SamplingConfig` field."""
        config = self.base.module.generation_config
        names = ["repetition_penalty"]
        if config.do_sample:
            names += ["temperature", "top_p", "top_k", "min_p", "typical_p"]
            names += ["epsilon_cutoff", "eta_cutoff"]
        values = {name: getattr(config, name, None) for name in names}
        found = {name: value for name, value in values.items() if value is not None}
        return {"temperature": 1.0} | found if config.do_sample else found

    def encode(self, prompt: Prompt, *, chat: bool | None = None) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: text, messages with `role` and `content`, or ids, which are taken as they are.
            chat: render text as a user's message; by default where there is a chat template.

        Raises:
            UsageError: the prompt is empty, or the chat template is missing or fails.
        """
        if isinstance(prompt, str):
            if self._is_raw(prompt, chat):
                return encode_raw(self.tokenizer, prompt)
            prompt = [{"role": "user", "content": prompt}]
        ids = [item for item in prompt if isinstance(item, int)]
        messages = [item for item in prompt if not isinstance(item, int)]
        return ids or encode_chat(self.tokenizer, messages, self.template)

    def encode_turn(self, question: Question, answers: Sequence[str]) -> list[int]:
        """Prompt ids of the turn of a question that follows `answers`.

        Raises:
            UsageError: the chat template is missing or fails.
        """
        if isinstance(question.first, str) and not self.has_template:
            return self.encode(question.first)
        return self.encode(question.messages(answers))

    def turns(self, question: Question) -> int:
        """How many turns of a question can be asked: without a chat template only the first."""
        return 1 + len(question.follow_ups) * self.has_template

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingConfig | None = None,
        limits: Limits | None = None,
        chat: bool | None = None,
    ) -> Result:
        """Generates one answer; arguments and errors as in `stream`."""
        *_, result = self.stream(prompt, sampling=sampling, limits=limits, chat=chat)
        assert isinstance(result, Result)
        return result

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingConfig | None = None,
        limits: Limits | None = None,
        chat: bool | None = None,
        cache: KVCache | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Generator[Event]:
        """Generates one answer: `Started`, a `Step` for each forward, then the `Result`.

        Args:
            prompt: text, messages with `role` and `content`, or token ids.
            sampling: greedy when not given.
            limits: 256 tokens when not given.
            chat: render text as a user's message; by default where there is a chat template.
            cache: rows of an earlier generation to reuse; afterwards it holds this one's,
                also when the consumer leaves early.
            should_stop: asked after each step; True ends the answer as interrupted.

        Raises:
            UsageError: the prompt is empty, or the chat template is missing or fails.
            ContextLengthError: the prompt does not fit the context.
        """
        called = time.perf_counter()
        sampling, limits = sampling or SamplingConfig(), limits or Limits()
        cache = KVCache() if cache is None else cache
        ids = self.encode(prompt, chat=chat)
        ids = fit_context(ids, self.base.context_length, limits.on_overflow)
        yield Started(len(ids))
        decoding = self.decode(ids, sampling, limits, cache)
        # Raw text continues the prompt: its ids are the context of the first piece.
        detokenizer = Detokenizer(self.tokenizer, ids if self._is_raw(prompt, chat) else ())
        steps: list[Step] = []
        ttft = 0.0
        try:
            for step in text_steps(decoding, detokenizer, StopFilter(limits.stop), should_stop):
                ttft = ttft or time.perf_counter() - called
                steps.append(step)
                yield step
        finally:
            decoding.close()
            cache.keep(len(ids) + sum(len(step.token_ids) for step in steps))
        yield self._result(len(ids), steps, sampling, ttft)

    def decode(
        self, ids: Sequence[int], sampling: SamplingConfig, limits: Limits, cache: KVCache
    ) -> Generator[DecodeStep]:
        """Decodes token ids to token ids: a step for each forward, without text and stop strings.

        Args:
            ids: the prompt, shorter than the context.
            limits: its stop strings and overflow rule do not matter here.
            cache: rows of an earlier generation to reuse; afterwards it holds this one's.
        """
        return decode(
            self.base,
            fresh_drafting(self.heads, self.tree, sampling, self.base.device, self.lookup),
            Sampler(sampling, self.base.device),
            ids,
            cache,
            Budget(
                limits.max_new_tokens,
                self.base.context_length,
                frozenset() if limits.ignore_eos else self.eos_ids,
            ),
        )

    def with_tree(self, source: str, report: Report = silent) -> "Medusa":
        """The same model with another tree: `auto`, a shipped one's name, or a file.

        Args:
            report: hears what is being measured for `auto`.

        Raises:
            TreeError: no such tree, or one that the heads cannot draft.
        """
        assert self.heads is not None, "a tree needs heads"
        static = self.tree.static if isinstance(self.tree, AutoTree) else self.tree
        if source == AUTO:
            auto = auto_tree(self.name, self.base, self.heads, static, report)
            return replace(self, tree=auto)
        tree = load_tree(source)
        tree.check_heads(self.heads.info.num_heads, self.heads.info.vocabulary)
        return replace(self, tree=tree)

    def _is_raw(self, prompt: Prompt, chat: bool | None) -> bool:
        return isinstance(prompt, str) and not (self.has_template if chat is None else chat)

    def _result(
        self, prompt_tokens: int, steps: list[Step], sampling: SamplingConfig, ttft: float
    ) -> Result:
        verified = [step for step in steps if step.accept_length > 0]
        lengths = tuple(step.accept_length for step in verified)
        finish = steps[-1].finish
        assert finish is not None, "the last step says why it is the last"
        warnings = list(self.heads.info.warnings) if self.heads is not None else []
        drafted = [step.accept_length for step in verified if step.nodes > 1]
        if len(drafted) >= SILENT_STEPS and max(drafted) == 1:
            warnings.append(
                f"no draft was accepted in {len(drafted)} steps: do the heads fit this model?"
            )
        return Result(
            text="".join(step.text for step in steps),
            token_ids=tuple(token for step in steps for token in step.token_ids),
            finish_reason=finish,
            prompt_tokens=prompt_tokens,
            accept_lengths=lengths,
            sampling=sampling,
            tree=None if self.heads is None else self.tree,
            step_nodes=tuple(step.nodes for step in verified),
            ttft_seconds=ttft,
            step_seconds=tuple(step.seconds for step in verified),
            warnings=tuple(warnings),
        )
