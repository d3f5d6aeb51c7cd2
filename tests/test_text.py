"""Text in and out: detokenizing, stop strings, prompts and templates."""

from itertools import pairwise

import pytest
from transformers import PreTrainedTokenizerFast

from conftest import CHAT_TEMPLATE, EOS, byte_tokenizer
from medusa_cli.config import FinishReason, Overflow
from medusa_cli.decoding.decode import DecodeStep
from medusa_cli.errors import ContextLengthError, UsageError
from medusa_cli.text.detokenizer import Detokenizer
from medusa_cli.text.events import Step, text_steps
from medusa_cli.text.prompts import (
    encode_chat,
    encode_raw,
    fit_context,
    render_chat,
    shipped_template,
)
from medusa_cli.text.stops import StopFilter

TEXTS = [
    "plain",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🏳️‍🌈",
    "a\tb\n\nc  d ",
    "�",
    "é" * 50,
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_no_character_is_split(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = encode_raw(tokenizer, text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text == tokenizer.decode(ids)
    if "�" not in text:
        assert all("�" not in piece for piece in pieces)


def test_bytes_that_never_make_a_character_show_at_the_end(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = [*b"ab", 0xE6, 0x97]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in ids) == "ab"
    assert detokenizer.flush() == "�"
    broken = [0xE6, *b"cd"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in broken]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(broken) == "�cd"


def test_special_tokens_leave_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer, context=[258])
    assert "".join(detokenizer.push(token) for token in [*b"hi", EOS]) + detokenizer.flush() == "hi"


class SpaceDropping:
    """Like sentencepiece tokenizers: a space in front of the decoded whole is dropped."""

    words = ("a", " b", " c")

    def decode(self, ids: list[int], **_options: bool) -> str:
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_context_keeps_a_leading_space() -> None:
    tokenizer = SpaceDropping()
    assert Detokenizer(tokenizer).push(1) == "b"  # type: ignore[arg-type]
    in_context = Detokenizer(tokenizer, context=[0])  # type: ignore[arg-type]
    assert [in_context.push(1), in_context.push(2)] == [" b", " c"]


@pytest.mark.parametrize("stops", [("END",), ("ab", "abc"), ("\n\n",), ("aa",)])
@pytest.mark.parametrize(
    "text", ["one END two", "xxabcab", "a\nb\n\nc", "aaa", "EN", "ENENDEND", "nothing", "E" * 9]
)
def test_stop_strings_are_found_however_they_are_split(stops: tuple[str, ...], text: str) -> None:
    found = [i for i in (text.find(stop) for stop in stops) if i >= 0]
    expected = text[: min(found)] if found else text
    for cut in range(len(text) + 1):
        for other in range(cut, len(text) + 1):
            pieces = [text[a:b] for a, b in pairwise([0, cut, other, len(text)])]
            stop_filter, shown = StopFilter(stops), ""
            for piece in pieces:
                if not stop_filter.stopped:
                    shown += stop_filter.push(piece)
            assert stop_filter.stopped == bool(found)
            assert shown + stop_filter.flush() == expected


def test_without_stop_strings_nothing_is_held_back() -> None:
    stop_filter = StopFilter(())
    assert [stop_filter.push(c) for c in "abc"] == ["a", "b", "c"]


def decoded(ids: list[int], finish: FinishReason | None = None) -> DecodeStep:
    return DecodeStep(tuple(ids), len(ids), 1, 0.0, finish)


def run_steps(
    tokenizer: PreTrainedTokenizerFast, steps: list[DecodeStep], *stops: str, stop_after: int = 99
) -> list[Step]:
    shown: list[Step] = []
    for step in text_steps(
        steps, Detokenizer(tokenizer), StopFilter(stops), lambda: len(shown) + 1 >= stop_after
    ):
        shown.append(step)
    return shown


@pytest.mark.parametrize("width", [1, 2, 3, 5, 11])
def test_stop_string_inside_an_accepted_path(
    tokenizer: PreTrainedTokenizerFast, width: int
) -> None:
    ids = list(b"hello STOP world")
    steps = [decoded(ids[i : i + width]) for i in range(0, len(ids), width)]
    shown = run_steps(tokenizer, steps, "STOP")
    assert "".join(step.text for step in shown) == "hello "
    assert shown[-1].finish is FinishReason.STOP
    kept = [token for step in shown for token in step.token_ids]
    assert kept == list(b"hello STOP"), "up to the token that completes the stop string"
    assert all(step.finish is None for step in shown[:-1])


def test_held_back_text_is_shown_when_the_answer_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    steps = [decoded(list(b"ab S")), decoded(list(b"TO"), FinishReason.LENGTH)]
    shown = run_steps(tokenizer, steps, "STOP")
    assert [step.text for step in shown] == ["ab ", "STO"]


def test_an_interruption_ends_with_the_step_and_shows_all(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    steps = [decoded(list(b"ab")), decoded([*b"c", 0xE6]), decoded(list(b"never"))]
    shown = run_steps(tokenizer, steps, stop_after=2)
    assert "".join(step.text for step in shown) == "abc�"
    assert shown[-1].finish is FinishReason.INTERRUPTED


def test_raw_prompts_must_not_be_empty(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode_raw(tokenizer, "hi") == list(b"hi")
    with pytest.raises(UsageError, match="empty"):
        encode_raw(tokenizer, "")


def test_chat_is_rendered_by_the_template() -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    assert render_chat(tokenizer, messages, None) == "<|user|>hi<|assistant|>"
    assert encode_chat(tokenizer, messages, None) == [258, *b"hi", 259]
    assert render_chat(tokenizer, messages, "{{ messages[0].content }}!") == "hi!"


@pytest.mark.parametrize("content", ["", "  \n"])
def test_empty_messages_are_refused(content: str) -> None:
    with pytest.raises(UsageError, match="empty"):
        encode_chat(byte_tokenizer(CHAT_TEMPLATE), [{"role": "user", "content": content}], None)


def test_a_missing_template_says_what_to_do(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match=r"--template FILE, or use --raw"):
        render_chat(tokenizer, [{"role": "user", "content": "hi"}], None)


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no') }}", "{{ 1 + 'a' }}"])
def test_a_failing_template_is_one_error(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    with pytest.raises(UsageError, match="chat template fails"):
        render_chat(tokenizer, [{"role": "user", "content": "hi"}], template)


def test_vicuna_template(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    template = shipped_template("vicuna")
    expected = "Be brief. USER: Hi ASSISTANT: Hello</s> USER: Bye ASSISTANT:"
    assert render_chat(tokenizer, messages, template) == expected
    default = render_chat(tokenizer, messages[1:2], template)
    assert default.startswith("A chat between a curious user")
    assert default.endswith("questions. USER: Hi ASSISTANT:")
    with pytest.raises(UsageError, match="roles"):
        render_chat(tokenizer, [*messages, {"role": "system", "content": "late"}], template)


def test_zephyr_template(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = render_chat(tokenizer, messages, shipped_template("zephyr"))
    assert text == "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\n"


def test_prompts_longer_than_the_context() -> None:
    ids = list(range(10))
    assert fit_context(ids, None, Overflow.ERROR) == ids
    assert fit_context(ids, 11, Overflow.ERROR) == ids
    with pytest.raises(ContextLengthError, match=r"10 tokens.*holds 10"):
        fit_context(ids, 10, Overflow.ERROR)
    assert fit_context(ids, 6, Overflow.TRUNCATE_LEFT) == [5, 6, 7, 8, 9]
