"""The chat's slash commands."""

import difflib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from medusa_cli.chat import accepted_by_depth
from medusa_cli.cli import session_file
from medusa_cli.config import Acceptance, SamplingConfig
from medusa_cli.decoding.adaptive import AUTO
from medusa_cli.errors import UsageError
from medusa_cli.models.storage import write_atomic

if TYPE_CHECKING:
    from medusa_cli.cli.repl import Repl

BAR_CELLS = 30
KEYS = """\
Enter sends · Alt-Enter or Ctrl-J: new line · \"\"\" opens and closes a block · Tab completes
Ctrl-C stops an answer, or clears the line · Ctrl-D leaves · Ctrl-R searches the history
Ctrl-X Ctrl-E opens $EDITOR · //text sends /text
Trace: the base model's own tokens are plain; accepted drafts are green (depth 1), cyan (2),
magenta (3), yellow (4), red (5 and deeper), or underlined where there is no colour."""


class Leave(Exception):  # noqa: N818  # not an error: the user has had enough
    """The user leaves the chat."""


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command; the method of `Commands` with its first name runs it.

    Attributes:
        names: without the slash; the first is the one shown.
        argument: what may follow, for the help.
        help: one line.
    """

    names: tuple[str, ...]
    argument: str
    help: str


COMMANDS = (
    Command(("help",), "", "show the commands and keys"),
    Command(("reset", "clear"), "", "forget the conversation"),
    Command(("regen",), "", "answer the last message again"),
    Command(("undo",), "", "take the last turn back"),
    Command(("edit",), "[TEXT]", "change the last message and ask again"),
    Command(("system",), "[TEXT]", "show or set the system message"),
    Command(("set",), "[KEY VALUE]", "show or set how answers are made"),
    Command(("show",), "model|template|params|prompt", "show one of them"),
    Command(("save",), "FILE", "save the conversation"),
    Command(("load",), "FILE", "load a saved conversation"),
    Command(("export",), "FILE.md", "write the conversation as Markdown"),
    Command(("stats",), "", "accept lengths and speed so far"),
    Command(("tree",), "[NAME|PATH|auto]", "show or change the tree"),
    Command(("heads",), "", "show the heads and decode with them"),
    Command(("plain",), "", "decode without speculation"),
    Command(("trace",), "on|off", "colour tokens by accepted depth"),
    Command(("exit", "quit"), "", "leave"),
)
COMMAND_NAMES = tuple(name for command in COMMANDS for name in command.names)


class Commands:
    """Runs the commands of one REPL."""

    def __init__(self, repl: "Repl") -> None:
        self._repl = repl
        self._chat = repl.chat

    def run(self, line: str) -> None:
        """Runs one command line.

        Raises:
            UsageError: there is no such command, or its argument is wrong.
            Leave: the user leaves.
        """
        name, _, argument = line[1:].partition(" ")
        for command in COMMANDS:
            if name in command.names:
                getattr(self, f"_{command.names[0]}")(argument.strip())
                return
        close = difflib.get_close_matches(name, COMMAND_NAMES, n=1)
        hint = f"did you mean /{close[0]}?" if close else "/help lists them"
        raise UsageError(f"no command /{name}: {hint} (//{name} sends it as text)")

    def _help(self, _argument: str) -> None:
        for command in COMMANDS:
            usage = f"/{command.names[0]} {command.argument}".strip()
            also = "".join(f", /{name}" for name in command.names[1:])
            self._repl.say(f"  {usage + also:<38}{command.help}")
        self._repl.say(KEYS)

    def _reset(self, _argument: str) -> None:
        self._chat.reset()
        self._repl.say("the conversation is forgotten")

    def _regen(self, _argument: str) -> None:
        if self._chat.sampling.temperature == 0:
            self._repl.note("at temperature 0 the answer is the same: /set temperature 0.7")
        else:
            self._chat.sampling = replace(self._chat.sampling, seed=SamplingConfig().seed)
        self._repl.ask_again(self._chat.undo())

    def _undo(self, _argument: str) -> None:
        turn = self._chat.undo()
        self._repl.say(f"took back: {_shortened(turn.user)}")

    def _edit(self, argument: str) -> None:
        if argument:
            turn = self._chat.undo()
            self._repl.ask_again(replace(turn, user=argument))
        elif self._repl.terminal:
            self._repl.draft = self._chat.undo().user
        else:
            raise UsageError("/edit without a terminal needs the new text behind it")

    def _system(self, argument: str) -> None:
        if argument:
            self._chat.system = argument
        self._repl.say(f"system: {self._chat.system or '(the template decides)'}")

    def _set(self, argument: str) -> None:
        key, _, value = argument.partition(" ")
        key = key.replace("-", "_")
        if key and value:
            self._assign(key, value.strip())
        elif key:
            raise UsageError("/set takes a key and a value: /set temperature 0.7")
        self._show_params()

    def _assign(self, key: str, value: str) -> None:
        chat = self._chat
        if key == "max_new_tokens":
            chat.limits = replace(chat.limits, max_new_tokens=_parsed(value, int, key))
            return
        current = asdict(chat.sampling)
        if key not in current:
            known = ", ".join([*current, "max_new_tokens"])
            raise UsageError(f"there is no '{key}' to set: one of {known}")
        chat.sampling = replace(chat.sampling, **{key: _parsed(value, type(current[key]), key)})

    def _show_params(self) -> None:
        for name, value in asdict(self._chat.sampling).items():
            self._repl.say(f"  {name:<20}{value}")
        limit = self._chat.limits.max_new_tokens
        self._repl.say(f"  {'max_new_tokens':<20}{'to the end' if limit is None else limit}")

    def _show(self, argument: str) -> None:
        match argument:
            case "params":
                self._show_params()
            case "template":
                model = self._chat.model
                self._repl.say(str(model.template or model.tokenizer.chat_template))
            case "prompt":
                messages = self._chat.messages()
                self._repl.say(self._chat.rendered("...") if messages else "(nothing was said yet)")
            case "model":
                base = self._chat.model.base
                self._repl.say(
                    f"{self._chat.model.name}: {type(base.module).__name__}, "
                    f"{base.parameter_bytes() / 1e9:.2f} GB, {base.precision} on {base.device}, "
                    f"context {base.context_length} tokens"
                )
            case _:
                raise UsageError("/show takes model, template, params or prompt")

    def _save(self, argument: str) -> None:
        path = _path(argument, "/save")
        session_file.save_json(path, self._chat.to_data())
        self._repl.say(f"saved {len(self._chat.turns)} turns to {path}")

    def _load(self, argument: str) -> None:
        path = _path(argument, "/load")
        self._chat.restore(session_file.load_json(path))
        self._repl.say(f"loaded {len(self._chat.turns)} turns from {path}")

    def _export(self, argument: str) -> None:
        path = _path(argument, "/export")
        titles = {"system": "System", "user": "User", "assistant": "Assistant"}
        sections = [f"## {titles[m['role']]}\n\n{m['content']}\n" for m in self._chat.messages()]
        text = f"# {self._chat.model.name}\n\n" + "\n".join(sections)
        write_atomic(path, text, private=True)
        self._repl.say(f"wrote {path}")

    def _stats(self, _argument: str) -> None:
        results = self._chat.results
        lengths = [length for result in results for length in result.accept_lengths]
        if not lengths:
            self._repl.say("no answer yet")
            return
        tokens = sum(len(result.token_ids) for result in results)
        seconds = sum(result.decode_seconds for result in results)
        self._repl.say(
            f"{tokens} tokens in {len(results)} answers, {len(lengths)} steps, "
            f"{(tokens - len(results)) / max(seconds, 1e-9):.1f} tokens/s, "
            f"mean accept length {fmean(lengths):.2f}"
        )
        self._repl.say("accept length")
        for length, count in sorted(Counter(lengths).items()):
            self._repl.say(_bar(f"{length}", count / len(lengths), f"{count}"))
        self._repl.say("steps that accepted a draft at depth")
        for depth, share in enumerate(accepted_by_depth(results), start=1):
            self._repl.say(_bar(f"{depth}", share, f"{share:.0%}"))

    def _tree(self, argument: str) -> None:
        if argument:
            self._chat.use_tree(argument, lambda stage: self._repl.note(stage.text))
        self._chat.require_heads()
        tree = self._chat.model.tree
        paused = " (not in use: /heads goes back to it)" if self._chat.plain else ""
        most = "up to " if tree.name == AUTO else ""
        self._repl.say(f"tree {tree.name}: {most}{tree.nodes} nodes, {tree.depth} deep{paused}")

    def _heads(self, _argument: str) -> None:
        info = self._chat.require_heads().info
        self._chat.plain = False
        self._repl.say(
            f"heads {info.name}: {info.num_heads} {info.kind} heads, "
            f"{info.num_layers} residual layers, {info.vocabulary} tokens"
        )

    def _plain(self, _argument: str) -> None:
        self._chat.plain = True
        self._repl.say("decoding plainly: /heads goes back to speculation")

    def _trace(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise UsageError("/trace takes on or off")
        if argument == "on" and not self._repl.terminal:
            raise UsageError("/trace colours text on a terminal only")
        self._repl.trace = argument == "on"

    def _exit(self, _argument: str) -> None:
        raise Leave


def _parsed(value: str, kind: type, key: str) -> Any:
    try:
        if kind is bool:
            return {"on": True, "true": True, "off": False, "false": False}[value.lower()]
        return Acceptance(value) if kind is Acceptance else kind(value)
    except (ValueError, KeyError):
        names = {bool: "on or off", Acceptance: "lossless or typical", int: "a whole number"}
        raise UsageError(f"{key} must be {names.get(kind, 'a number')}, not '{value}'") from None


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"{command} needs a file name")
    return Path(argument).expanduser()


def _bar(label: str, share: float, text: str) -> str:
    return f"  {label:>3} {'#' * round(share * BAR_CELLS):<{BAR_CELLS}} {text}"


def _shortened(text: str) -> str:
    line = text.split("\n", 1)[0]
    return line if line == text and len(line) <= 60 else f"{line[:57]}..."
