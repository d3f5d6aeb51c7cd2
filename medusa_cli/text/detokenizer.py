"""Token ids to text, piece by piece, such that the pieces add up to the decoded whole."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 8  # of a prompt, enough for any rule that looks at the token before


class Detokenizer:
    """Decodes an answer incrementally; special tokens leave no text.

    A piece is given out once its characters are whole: tokens that split a character wait for the
    rest of it.

    Args:
        tokenizer: of the model.
        context: ids in front of the answer, for tokenizers that drop a leading space otherwise.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A window of ids: those given out already, as context, and those that are not.
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._given = len(self._window)

    def push(self, token_id: int) -> str:
        """Takes one more token and returns the text that is whole now, often ''."""
        self._window.append(token_id)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        # Two stretches of ids suffice: the last one given out is the context of the next.
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return text

    def flush(self) -> str:
        """Returns what is left; bytes that never made a character show as U+FFFD."""
        text = self._pending()
        self._given = len(self._window)
        return text

    def _pending(self) -> str:
        before = self._decode(self._window[: self._given])
        return self._decode(self._window)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)
