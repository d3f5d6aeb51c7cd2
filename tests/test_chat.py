"""Conversations: one KV cache across turns, rewinding, saving, and interruptions."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from conftest import CHAT_TEMPLATE, CONTEXT, byte_tokenizer, head_tensors, tiny_base
from medusa_cli.chat import FORMAT, Chat, accepted_by_depth, parse_conversation
from medusa_cli.cli.live import Thoughts, complete_blocks
from medusa_cli.config import Limits, SamplingConfig
from medusa_cli.decoding.tree import dense_tree
from medusa_cli.errors import ContextLengthError, MedusaError, TreeError, UsageError
from medusa_cli.models.cache import KVCache
from medusa_cli.models.checkpoint import find_heads, load_heads
from medusa_cli.models.progress import Stage
from medusa_cli.session import Medusa
from medusa_cli.text.events import Result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    """A tiny model with random heads and a tree wide enough for drafts to be accepted."""
    folder = tmp_path_factory.mktemp("heads")
    save_file(head_tensors(2), folder / "medusa_lm_head.safetensors")
    base = tiny_base()
    files = find_heads(folder)
    assert files is not None
    heads = load_heads(files, base, "tiny")
    return Medusa("tiny", base, byte_tokenizer(CHAT_TEMPLATE), heads, dense_tree("wide", [120]))


@pytest.fixture
def chat(model: Medusa) -> Chat:
    limits = Limits(max_new_tokens=9, ignore_eos=True)
    return Chat(model, SamplingConfig(temperature=0.8, seed=1), limits)


def ask(chat: Chat, user: str) -> Result:
    *_, result = chat.ask(user)
    assert isinstance(result, Result)
    return result


def fresh(chat: Chat) -> Chat:
    """The same conversation without rows in its cache."""
    return replace(chat, turns=list(chat.turns), cache=KVCache())


@pytest.fixture
def rows(model: Medusa) -> Iterator[list[int]]:
    """The number of tokens of each forward."""
    seen: list[int] = []
    handle = model.base.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield seen
    handle.remove()


def test_a_second_turn_prefills_only_what_is_new(chat: Chat, rows: list[int]) -> None:
    ask(chat, "one")
    known = len(chat.cache.ids)
    other = fresh(chat)
    rows.clear()
    result = ask(chat, "two")
    assert rows[0] == result.prompt_tokens - known
    assert rows[0] <= 6, "the template's marks, the message, and at most one token of the answer"
    assert ask(other, "two").token_ids == result.token_ids
    assert chat.turns[-1].ids == other.turns[-1].ids


def test_the_answer_keeps_the_ids_it_was_generated_as(chat: Chat) -> None:
    result = ask(chat, "one")
    ids = chat.prompt_ids("two")
    assert tuple(ids[: len(chat.turns[0].ids)]) == chat.turns[0].ids
    assert tuple(ids[result.prompt_tokens :][:9]) == result.token_ids


def test_undo_and_ask_again_give_the_same_answer(chat: Chat) -> None:
    ask(chat, "one")
    first = ask(chat, "two")
    taken = chat.undo()
    assert (taken.user, taken.answer) == ("two", first.text)
    assert len(chat.turns) == 1
    assert ask(chat, "two").token_ids == first.token_ids
    chat.undo()
    other = ask(chat, "three")
    assert other.token_ids == ask_in_fresh(chat, "three").token_ids
    chat.undo()
    chat.undo()
    with pytest.raises(UsageError, match="no turn"):
        chat.undo()


def ask_in_fresh(chat: Chat, user: str) -> Result:
    before = fresh(chat)
    before.turns.pop()
    return ask(before, user)


def test_reset_forgets_the_turns(chat: Chat) -> None:
    first = ask(chat, "one")
    chat.reset()
    assert chat.messages() == []
    assert ask(chat, "one").token_ids == first.token_ids


def test_system_message_comes_first(chat: Chat) -> None:
    ask(chat, "one")
    chat.system = "Be brief."
    assert chat.messages("two")[0] == {"role": "system", "content": "Be brief."}
    assert ask(chat, "two").token_ids == ask_in_fresh(chat, "two").token_ids


def test_decoding_can_be_switched_in_the_middle(chat: Chat) -> None:
    other = fresh(chat)
    ask(chat, "one")
    ask(other, "one")
    other.plain = True
    plain = ask(other, "two")
    assert plain.tree is None
    assert set(plain.accept_lengths) == {1}
    assert ask(chat, "two").token_ids == plain.token_ids
    with pytest.raises(TreeError):
        other.use_tree("mc_sim_7b_63")
    assert other.plain, "a tree that does not fit changes nothing"


def test_a_chat_goes_on_with_the_adaptive_tree(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    said: list[Stage] = []
    other = fresh(chat)
    for talk in (chat, other):
        ask(talk, "one")
    other.use_tree("auto", said.append)
    result = ask(other, "two")
    assert result.token_ids == ask(chat, "two").token_ids
    assert result.tree == other.model.tree
    assert other.model.tree.name == "auto"
    assert any("what steps cost" in stage.text for stage in said)


def test_fifty_interrupts_leave_the_session_and_the_cache_right(chat: Chat) -> None:
    """At random steps, and in the middle of random layers of random forwards."""
    randomness = random.Random(0)
    module = chat.model.base.module
    for _ in range(50):
        if len(chat.prompt_ids("x")) > CONTEXT - 40:
            chat.reset()
        turns = len(chat.turns)
        if randomness.random() < 0.5:
            steps = iter(range(randomness.randrange(1, 6)))
            *_, result = chat.ask("x", lambda steps=steps: next(steps, None) is None)  # type: ignore[misc]
            assert isinstance(result, Result)
            assert len(chat.turns) == turns + 1
        else:
            layer = randomness.choice(list(module.model.layers))
            countdown = iter(range(randomness.randrange(4)))

            def interrupt(*_args: object, countdown: Iterator[int] = countdown) -> None:
                if next(countdown, None) is None:
                    raise KeyboardInterrupt

            handle = layer.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(chat.ask("x"))
            handle.remove()
            assert len(chat.turns) == turns
        assert {layer.get_seq_length() for layer in chat.cache.layers} <= {len(chat.cache.ids)}
        other = fresh(chat)
        assert ask(chat, "y").token_ids == ask(other, "y").token_ids


def test_an_interrupted_answer_is_kept_and_marked(chat: Chat) -> None:
    *_, result = chat.ask("one", lambda: True)
    assert isinstance(result, Result)
    assert chat.turns[0].interrupted
    assert chat.turns[0].answer == result.text
    assert chat.to_data()["messages"][1]["interrupted"] is True


def test_a_full_context_is_said_and_the_oldest_turns_can_go(chat: Chat) -> None:
    for user in ("first", "second", "third"):
        ask(chat, user + "x" * 14)
    before = chat.to_data()
    long = "y" * 40
    with pytest.raises(ContextLengthError, match="the context holds 128"):
        ask(chat, long)
    assert chat.to_data() == before
    turns = list(chat.turns)
    dropped = chat.drop_oldest(long)
    assert [turn.user for turn in chat.turns] == [turn.user for turn in turns[dropped:]]
    assert len(chat.prompt_ids(long)) < CONTEXT * 0.75
    one_more = replace(chat, turns=[replace(t, ids=()) for t in turns[dropped - 1 :]])
    assert len(one_more.prompt_ids(long)) >= CONTEXT * 0.75, "no more is dropped than needed"
    ask(chat, long)
    before = chat.to_data()
    with pytest.raises(ContextLengthError, match="the message alone"):
        chat.drop_oldest("z" * CONTEXT)
    assert chat.to_data() == before


def test_saving_and_loading_go_round(chat: Chat, model: Medusa) -> None:
    chat.system = "Be."
    ask(chat, "one")
    list(chat.ask("two", lambda: True))
    data = chat.to_data()
    other = Chat(model, chat.sampling, chat.limits)
    other.restore(data)
    assert other.to_data() == data
    assert other.turns[1].interrupted
    assert ask(other, "three").prompt_tokens > 0


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"format": "medusa-chat/2", "messages": []},
        {"format": FORMAT},
        {"format": FORMAT, "messages": [3]},
        {"format": FORMAT, "messages": [{"role": "user"}]},
        {"format": FORMAT, "messages": [{"role": "user", "content": "x"}]},
        {"format": FORMAT, "messages": [{"role": "assistant", "content": "x"}] * 2},
    ],
)
def test_damaged_sessions_are_refused_and_change_nothing(chat: Chat, data: object) -> None:
    ask(chat, "one")
    before = chat.to_data()
    with pytest.raises(UsageError):
        chat.restore(data)
    assert chat.to_data() == before


def test_an_empty_session_is_a_session() -> None:
    assert parse_conversation({"format": FORMAT, "messages": []}) == (None, [])


def test_a_chat_without_heads_says_so(model: Medusa) -> None:
    chat = Chat(replace(model, heads=None), SamplingConfig(), Limits())
    with pytest.raises(UsageError, match="started with --plain"):
        chat.use_tree("mc_sim_7b_7")


def test_acceptance_by_depth(chat: Chat) -> None:
    result = replace(ask(chat, "one"), accept_lengths=(1, 3, 2, 1))
    assert accepted_by_depth([result]) == [0.5, 0.25]
    assert accepted_by_depth([]) == []


def test_errors_of_a_chat_are_ours(chat: Chat) -> None:
    for user in ("", " "):
        with pytest.raises(MedusaError):
            ask(chat, user)


def test_thoughts_are_told_apart_however_the_tags_are_split() -> None:
    text = "<think>hm</think>yes <thin> no</think>"
    for cut in range(len(text)):
        thoughts = Thoughts(inside=False)
        segments = [*thoughts.split(text[:cut]), *thoughts.split(text[cut:])]
        assert "".join(segment for segment, _ in segments) == text
        dimmed = "".join(segment for segment, thought in segments if thought)
        assert dimmed == ">hm</think>"
    assert Thoughts(inside=True).split("a</think>b") == [("a</think>", True), ("b", False)]


def test_markdown_blocks_end_at_blank_lines_outside_fences() -> None:
    text = "# T\n\npara\nmore\n\n```\ncode\n\nstill\n```\n\nrest"
    blocks, rest = complete_blocks(text)
    assert blocks == ["# T\n\n", "para\nmore\n\n", "```\ncode\n\nstill\n```\n\n"]
    assert rest == "rest"
    assert complete_blocks("```\nopen\n\n") == ([], "```\nopen\n\n")
    whole = ""
    for char in text:
        whole += char
        found, rest = complete_blocks(whole)
        assert "".join(found) + rest == whole
