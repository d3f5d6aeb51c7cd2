"""What the user said, as token ids: chat templates, raw text, and the limit of the context."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli.config import Overflow
from medusa_cli.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
_TEMPLATES = Path(__file__).parent / "templates"


def shipped_template(name: str) -> str:
    """A chat template that comes with the package."""
    return (_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def encode_raw(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Ids of a text to be continued, with the special tokens that the tokenizer puts in front.

    Raises:
        UsageError: there is nothing to continue.
    """
    ids = list(tokenizer(text)["input_ids"])
    if not text or not ids:
        raise UsageError("the prompt is empty: give some text")
    return ids


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], template: str | None
) -> list[int]:
    """Ids of a conversation rendered by a chat template, ending where the answer begins.

    Args:
        template: Jinja text; None takes the tokenizer's own.

    Raises:
        UsageError: the last message is empty, there is no template, or it fails on these messages.
    """
    if not messages or not messages[-1]["content"].strip():
        raise UsageError("the prompt is empty: give some text")
    return list(
        tokenizer(render_chat(tokenizer, messages, template), add_special_tokens=False)["input_ids"]
    )


def continue_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    template: str | None,
    before: Sequence[int],
) -> list[int]:
    """Like `encode_chat`, but what is there already keeps its ids.

    Generated text often encodes to other ids than those it was generated as. Where the rendered
    text starts with the text of `before`, those ids stay, and only the rest is encoded.

    Args:
        before: ids of the conversation so far, as fed to the model and emitted by it.
    """
    ids = encode_chat(tokenizer, messages, template)
    known = tokenizer.decode(
        list(before), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    text = render_chat(tokenizer, messages, template)
    if not before or not text.startswith(known):
        return ids
    rest = tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"]
    return [*before, *rest]


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], template: str | None
) -> str:
    """The text that a chat template makes of a conversation.

    Raises:
        UsageError: there is no template, or it fails on these messages.
    """
    from jinja2 import TemplateError

    if template is None and tokenizer.chat_template is None:
        raise UsageError(
            "this model has no chat template: give one with --template FILE, or use --raw"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise UsageError(f"the chat template fails on this conversation: {error}") from None
    return str(text)


def fit_context(ids: list[int], context_length: int | None, overflow: Overflow) -> list[int]:
    """The prompt ids, cut from the left if that was asked for, so that one token can follow.

    Raises:
        ContextLengthError: too long, and not to be cut.
    """
    if context_length is None or len(ids) < context_length:
        return ids
    if overflow is Overflow.TRUNCATE_LEFT:
        return ids[len(ids) - context_length + 1 :]
    raise ContextLengthError(
        f"the prompt has {len(ids)} tokens, and the model's context holds {context_length} with "
        "the answer.\nShorten it, or keep its end with --on-overflow truncate-left."
    )
