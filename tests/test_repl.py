"""`medusa chat` in a pseudo-terminal and on pipes, on a tiny model that says what it is told."""

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import select
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest

ROOT = Path(__file__).parents[1]
# Runs the command line on a model that answers every prompt with $ANSWER, a step in $DELAY
# seconds, and writes the rows of each forward to $ROWS. No file may grow beyond $FILE_SIZE bytes.
SCRIPTED = """
import os, resource, sys, time
size = int(os.environ.get("FILE_SIZE", resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
from medusa_cli.models.base import BaseModel, ForwardOutput
answer = [*os.environ["ANSWER"].encode(), 257]
forward, start = BaseModel._forward, 0
def scripted(self, ids, positions, mask, cache, logits_to_keep):
    global start
    output = forward(self, ids, positions, mask, cache, logits_to_keep)
    with open(os.environ["ROWS"], "a") as rows:
        print(len(ids), file=rows)
    time.sleep(float(os.environ.get("DELAY", 0)))
    if logits_to_keep:
        start, positions = int(positions[-1]) + 1, positions[-1:]
    logits = output.logits * 0
    for row, position in enumerate(positions.tolist()):
        logits[row, answer[min(position + 1 - start, len(answer) - 1)]] = 9.0
    return ForwardOutput(output.hidden, logits)
BaseModel._forward = scripted
from medusa_cli.models import loader
loader._on_engine = lambda module, options: BaseModel(module)  # an engine would try its forwards
from medusa_cli.cli.app import main
main()
"""
# The line editor switches bracketed paste on, draws its line, and shows the cursor.
PROMPT = re.compile(rb"\x1b\[\?2004h.*?\x1b\[\?25h", re.DOTALL)
# The line about an answer that is over.
ANSWERED = re.compile(rb"\(\d+ tokens [^\n]*\)\r\n")
UP, CTRL_C, CTRL_D, CTRL_J, ALT_ENTER, TAB = "\x1b[A", "\x03", "\x04", "\n", "\x1b\r", "\t"


class Terminal:
    """A command on a pseudo-terminal of its own; every byte that it writes is kept."""

    def __init__(
        self, command: list[str], environment: dict[str, str], rows: int = 24, columns: int = 80
    ) -> None:
        self.process_id, self.master = pty.fork()
        if self.process_id == 0:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(1, termios.TIOCSWINSZ, size)
            os.execvpe(command[0], command, environment)
        self.written = b""
        self.rows, self.columns = rows, columns
        self._seen = 0

    def expect(self, pattern: str | re.Pattern[bytes], seconds: float = 60) -> bytes:
        """Waits for a pattern behind what was expected before; returns the bytes up to its end."""
        wanted = re.compile(re.escape(pattern).encode()) if isinstance(pattern, str) else pattern
        deadline = time.monotonic() + seconds
        while True:
            match = wanted.search(self.written, self._seen)
            if match:
                before, self._seen = self._seen, match.end()
                return self.written[before : match.end()]
            left = deadline - time.monotonic()
            assert left > 0, f"no {wanted.pattern!r} in {self.written[self._seen :]!r}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    self.written += os.read(self.master, 65536)
                except OSError:
                    pytest.fail(f"ended without {wanted.pattern!r}: {self.written!r}")

    def send(self, text: str) -> None:
        """Types."""
        os.write(self.master, text.encode())

    def ask(self, text: str, until: str | re.Pattern[bytes]) -> bytes:
        """Types a line, waits for an answer and for the prompt behind it."""
        self.send(f"{text}\r")
        answer = self.expect(until)
        self.expect(PROMPT)
        return answer

    def wait(self, seconds: float = 30) -> int:
        """Reads to the end; returns the exit code."""
        with contextlib.suppress(OSError):  # how a terminal ends on Linux
            while select.select([self.master], [], [], seconds)[0]:
                self.written += os.read(self.master, 65536)
            pytest.fail(f"still running after {self.written[-200:]!r}")
        _, status = os.waitpid(self.process_id, 0)
        return os.waitstatus_to_exitcode(status)

    def screen(self) -> list[str]:
        """All lines that a terminal shows at last, scrolled-off ones included."""
        screen = pyte.HistoryScreen(self.columns, self.rows, history=10_000)
        pyte.ByteStream(screen).feed(self.written)
        above = ["".join(line[x].data for x in range(self.columns)) for line in screen.history.top]
        return [line.rstrip() for line in (*above, *screen.display)]


Start = Callable[..., Terminal]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "MEDUSA_DEBUG"}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "ROWS": str(tmp_path / "rows"),
        "ANSWER": "Hello there.",
        "OMP_NUM_THREADS": "1",
    }


def command(folder: Path, *arguments: str) -> list[str]:
    tree = ("--tree", str(folder / "all.json"))
    return [sys.executable, "-c", SCRIPTED, "chat", "-m", str(folder), *tree, *arguments]


@pytest.fixture
def start(model_folder: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Starts a chat in a terminal and waits for its prompt."""
    config = model_folder / "config.json"
    roomy = json.loads(config.read_text()) | {"max_position_embeddings": 16384}
    config.write_text(json.dumps(roomy))
    begun: list[Terminal] = []

    def begin(*arguments: str, rows: int = 24, columns: int = 80, **variables: str) -> Terminal:
        terminal = Terminal(
            command(model_folder, *arguments), environment | variables, rows, columns
        )
        begun.append(terminal)
        terminal.expect("/help for help")
        terminal.expect(PROMPT)
        return terminal

    yield begin
    for terminal in begun:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(terminal.process_id, 9)
            os.waitpid(terminal.process_id, 0)
        os.close(terminal.master)


def last_chat(environment: dict[str, str]) -> list[dict[str, object]]:
    path = Path(environment["XDG_STATE_HOME"]) / "medusa-cli" / "last-chat.json"
    messages = json.loads(path.read_text())["messages"]
    assert isinstance(messages, list)
    return messages


def users(environment: dict[str, str]) -> list[object]:
    return [m["content"] for m in last_chat(environment) if m["role"] == "user"]


def test_keys(start: Start, environment: dict[str, str]) -> None:
    """One message each: a paste of three lines, new lines by two keys, a block in quotes."""
    terminal = start()
    terminal.send("\x1b[200~one\ntwo\nthree\x1b[201~")
    terminal.ask("", ANSWERED)
    terminal.ask(f"a{CTRL_J}b{ALT_ENTER}c", ANSWERED)
    terminal.ask('"""x\ry\r"""', ANSWERED)
    terminal.send(f"thrown away{CTRL_C}")
    terminal.ask("kept", ANSWERED)
    assert users(environment) == ["one\ntwo\nthree", "a\nb\nc", "x\ny", "kept"]
    terminal.send(f"\r{CTRL_D}")
    assert terminal.wait() == 0
    folder = Path(environment["XDG_STATE_HOME"]) / "medusa-cli"
    for name in ("history", "last-chat.json"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_what_is_typed_too_early_is_sent_as_it_was_typed(
    model_folder: Path, environment: dict[str, str]
) -> None:
    """While the model loads, and while it answers; without echo, and Enter is no new line."""
    terminal = Terminal(command(model_folder), environment | {"DELAY": "0.3"})
    terminal.expect("loading")
    terminal.send("first\r")
    terminal.expect("/help for help")
    assert b"first" not in terminal.written
    terminal.expect(re.compile(rb"accepted \d"))
    terminal.send("second\r")
    terminal.expect(ANSWERED)
    terminal.expect(ANSWERED)
    terminal.expect(PROMPT)
    assert users(environment) == ["first", "second"]
    terminal.send(f"third{CTRL_J}{CTRL_J}\r")
    terminal.expect(ANSWERED)
    terminal.expect(PROMPT)
    assert users(environment)[-1] == "third", "empty lines at the end are nothing to say"
    terminal.send(CTRL_D)
    assert terminal.wait() == 0


def test_editing_keys(start: Start, environment: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-R finds an earlier message, Ctrl-X Ctrl-E edits in $EDITOR, Tab completes."""
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'from the editor' > \"$1\"\n")
    editor.chmod(0o755)
    terminal = start(EDITOR=str(editor), VISUAL=str(editor))
    terminal.ask("a needle in the hay", ANSWERED)
    terminal.ask("something else", ANSWERED)
    terminal.send("\x12needle")
    terminal.expect("hay")
    terminal.send("\r")
    terminal.ask("", ANSWERED)
    terminal.send("\x18\x05")
    terminal.expect("from the editor")
    terminal.ask("", ANSWERED)
    assert users(environment) == [
        "a needle in the hay",
        "something else",
        "a needle in the hay",
        "from the editor",
    ]
    terminal.send(f"/und{TAB}")
    terminal.expect("/undo")
    terminal.ask("", "took back: from the editor")
    terminal.send(f"/tree zeph{TAB}")
    terminal.expect("zephyr_stage2")
    terminal.ask("", "tree zephyr_stage2")


def test_history_and_continue(start: Start, environment: dict[str, str]) -> None:
    first = start()
    first.ask("remember me", ANSWERED)
    first.send(CTRL_D)
    assert first.wait() == 0
    second = start("--continue")
    assert b"1 turns resumed" in second.written
    second.send(UP)
    second.expect("remember me")
    second.ask("", ANSWERED)
    assert users(environment) == ["remember me", "remember me"]


def test_commands(start: Start, environment: dict[str, str], tmp_path: Path) -> None:
    terminal = start()
    ask = terminal.ask
    for name in ("reset", "regen", "undo", "edit", "system", "set", "show", "save", "load"):
        assert f"/{name}".encode() in ask("/help", "5 and deeper")
    ask("/regn", "did you mean /regen?")
    ask("/xyzzy", "/help lists them")
    ask("/undo", "no turn to take back")
    ask("first", ANSWERED)
    ask("//slash", ANSWERED)
    assert users(environment) == ["first", "/slash"]
    ask("/undo", "took back: /slash")
    ask("/regen", ANSWERED)
    ask("/edit changed", ANSWERED)
    assert users(environment) == ["changed"]
    terminal.send("/edit\r")
    terminal.expect("> changed")
    terminal.ask(" again", ANSWERED)
    assert users(environment) == ["changed again"]
    ask("/system Be brief.", "system: Be brief.")
    ask("/set temperature 0.5", re.compile(rb"temperature +0.5"))
    ask("/set temperature hot", "temperature must be a number")
    ask("/set colour red", "there is no 'colour' to set")
    ask("/set max-new-tokens 5", re.compile(rb"max_new_tokens +5"))
    ask("/show model", "LlamaForCausalLM")
    ask("/show template", "for message in messages")
    ask("/show params", "repetition_penalty")
    ask("/show prompt", "<|system|>Be brief.<|user|>changed again<|assistant|>Hello there.")
    ask("/show", "/show takes model")
    ask("/stats", "steps that accepted a draft at depth")
    ask("/tree", "tree all: 261 nodes, 1 deep")
    ask("/tree mc_sim_7b_7", "tree mc_sim_7b_7: 8 nodes, 3 deep")
    ask("/tree nope", "no tree 'nope'")
    ask("/plain", "decoding plainly")
    ask("/tree", "not in use")
    ask("/heads", "4 medusa heads")
    terminal.send("/trace on\r")
    terminal.expect(PROMPT)
    ask("/trace sideways", "/trace takes on or off")
    saved, exported = tmp_path / "chat.json", tmp_path / "chat.md"
    ask(f"/save {saved}", "saved 1 turns")
    ask(f"/export {exported}", "wrote")
    assert "## User\n\nchanged again" in exported.read_text()
    ask("/reset", "forgotten")
    ask(f"/load {saved}", "loaded 1 turns")
    (tmp_path / "bad.json").write_text("{")
    ask(f"/load {tmp_path / 'bad.json'}", "is not a saved chat")
    ask("/load /no/such", "cannot be read")
    ask("/save /no/such/folder/file", "cannot be written")
    ask("/save", "/save needs a file name")
    ask("/set max_new_tokens 50", "50")
    ask("still here", ANSWERED)
    assert users(environment) == ["changed again", "still here"]
    terminal.send("/ex" + TAB)
    terminal.expect(re.compile(rb"exit|export"))
    terminal.send(f"{CTRL_C}/exit\r")
    assert terminal.wait() == 0


def test_an_interrupt_keeps_the_part_and_the_next_turn_works(
    start: Start, environment: dict[str, str]
) -> None:
    terminal = start(ANSWER="abcdefghijklmnopqrstuvwxyz", DELAY="0.3")
    terminal.send("one\r")
    terminal.expect("bc")
    forwards = len(Path(environment["ROWS"]).read_text().splitlines())
    terminal.send(CTRL_C)
    terminal.expect("[interrupted]")
    terminal.expect(PROMPT)
    after = len(Path(environment["ROWS"]).read_text().splitlines())
    assert after <= forwards + 2, "the running step, and no more than one that had begun"
    answer = last_chat(environment)[1]
    assert answer["interrupted"] is True
    assert "abcdefghijklmnopqrstuvwxyz".startswith(str(answer["content"]))
    assert str(answer["content"]).startswith("abc")
    terminal.ask("/set max_new_tokens 3", "3")
    terminal.send("two\r")
    terminal.expect("bc")
    terminal.expect(PROMPT)
    assert users(environment) == ["one", "two"]


def test_two_interrupts_leave_with_130(start: Start) -> None:
    terminal = start(ANSWER="abcdefghijklmnopqrstuvwxyz" * 9, DELAY="1.5")
    terminal.send("one\r")
    terminal.expect("bc")
    terminal.send(CTRL_C)
    time.sleep(0.3)  # two at once would arrive as one; the step takes longer
    terminal.send(CTRL_C)
    assert terminal.wait() == 130
    assert b"Traceback" not in terminal.written
    assert terminal.written.rfind(b"\x1b[?25h") >= terminal.written.rfind(b"\x1b[?25l")
    after = termios.tcgetattr(terminal.master)
    assert after[3] & termios.ECHO
    assert after[3] & termios.ICANON


def test_fifty_interrupts_lose_nothing(start: Start, environment: dict[str, str]) -> None:
    """Pressed at random moments; the next answer is whole."""
    terminal = start(ANSWER="abcdefghij", DELAY="0.01")
    randomness = random.Random(0)
    for i in range(50):
        terminal.send(f"{i}\r")
        terminal.expect(re.compile(rb"\x1b\[\?2004l"))  # the line is sent
        time.sleep(randomness.random() * 0.12)
        terminal.send(CTRL_C)
        terminal.expect(PROMPT)
    terminal.ask("last", ANSWERED)
    sent = [str(user) for user in users(environment)]
    assert sent == [*map(str, range(50)), "last"]
    answers = [m for m in last_chat(environment) if m["role"] == "assistant"]
    assert answers[-1] == {"role": "assistant", "content": "abcdefghij"}
    assert any("interrupted" in answer for answer in answers)
    assert all("abcdefghij".startswith(str(answer["content"])) for answer in answers)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0


LINES = [f"line {i}." for i in range(190)]
LINES[20:20] = [f"{i} 日本語 👍 [bold]x[0] [/]  {'字' * 30}" for i in range(10)]  # wider than 60


def test_a_long_answer_is_printed_once(start: Start) -> None:
    terminal = start(ANSWER="\n".join(LINES), columns=60)
    terminal.send("go\r")
    terminal.expect(ANSWERED)
    terminal.expect(PROMPT)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    written = terminal.written.decode()
    assert "�" not in written
    answer = written[written.index("\x1b7") : written.rindex("\x1b7")]
    assert not re.search(r"\x1b\[\d*[AHfFd]", answer), "nothing moves above the footer's line"
    shown = "\n".join(terminal.screen()).replace(" ", "")
    for line in LINES[:20] + LINES[30:]:
        assert shown.count(f"\n{line.replace(' ', '')}\n") == 1, line
    for i, line in enumerate(LINES[20:30]):
        wrapped = shown[shown.index(f"\n{i}日本語") + 1 :].replace("\n", "")
        assert wrapped.startswith(line.replace(" ", ""))


def test_markdown_blocks_and_thoughts(start: Start) -> None:
    answer = "<think>hidden</think>\n\n# Title\n\n* item\n"
    rendered = start("--markdown", ANSWER=answer)
    rendered.ask("go", ANSWERED)
    lines = [line.strip() for line in rendered.screen()]
    assert any("Title" in line and "#" not in line for line in lines)
    assert "• item" in lines
    plain = start(ANSWER=answer)
    plain.ask("go", ANSWERED)
    assert b"\x1b[2m" in plain.written
    assert "# Title" in [line.strip() for line in plain.screen()]


def test_the_context_fills_and_the_user_is_asked(
    start: Start, environment: dict[str, str], model_folder: Path
) -> None:
    config = model_folder / "config.json"
    tight = json.loads(config.read_text()) | {"max_position_embeddings": 128}
    config.write_text(json.dumps(tight))
    terminal = start(ANSWER="z" * 40)
    terminal.ask("a" * 20, ANSWERED)
    terminal.ask("b" * 20, "the context is nearly full")
    terminal.send("c" * 20 + "\r")
    terminal.expect("drop the oldest turns, or stop? [d/s]")
    terminal.send("s\r")
    terminal.expect("the message was not sent")
    terminal.expect(PROMPT)
    assert users(environment) == ["a" * 20, "b" * 20]
    terminal.send("c" * 20 + "\r")
    terminal.expect("[d/s]")
    terminal.send("d\r")
    terminal.expect("dropped the oldest")
    terminal.expect(ANSWERED)
    terminal.expect(PROMPT)
    assert users(environment)[-1] == "c" * 20
    assert "a" * 20 not in users(environment)


def piped(
    folder: Path, environment: dict[str, str], text: bytes, *arguments: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(folder, *arguments), input=text, capture_output=True, env=environment, check=False
    )


def test_pipes(model_folder: Path, environment: dict[str, str]) -> None:
    empty = subprocess.run(
        command(model_folder), stdin=subprocess.DEVNULL, capture_output=True, env=environment,
        check=False,
    )  # fmt: skip
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, b"", b"")
    assert not Path(environment["ROWS"]).exists(), "no model was run"
    one = piped(model_folder, environment, b"hi\n")
    assert (one.returncode, one.stdout, one.stderr) == (0, b"Hello there.\n", b"")
    both = piped(model_folder, environment, b'\nhi\n/nope\n"""\na\nb\n"""\n/show prompt\n')
    assert both.returncode == 2
    shown = b"<|user|>hi<|assistant|>Hello there.<|user|>a\nb<|assistant|>Hello there."
    assert both.stdout.startswith(b"Hello there.\nHello there.\n" + shown)
    assert b"no command /nope" in both.stderr
    assert b"\x1b" not in both.stdout + both.stderr
    latin = piped(model_folder, environment, b"caf\xe9\n")
    assert latin.returncode == 2
    assert b"not UTF-8" in latin.stderr
    need = piped(model_folder, environment, b"hi\n", "--markdown")
    assert (need.returncode, need.stdout) == (2, b"")


def test_a_second_turn_prefills_only_what_is_new(
    model_folder: Path, environment: dict[str, str]
) -> None:
    plain = [sys.executable, "-c", SCRIPTED, "chat", "-m", str(model_folder), "--plain"]
    subprocess.run(plain, input=b"one\ntwo\n", env=environment, check=True, capture_output=True)
    rows = [int(line) for line in Path(environment["ROWS"]).read_text().split()]
    prefills = [count for count in rows if count > 1]
    assert prefills == [5, 5], "two marks and three letters; the first answer stays in the cache"


def test_a_model_without_a_template_says_what_to_do(
    model_folder: Path, environment: dict[str, str]
) -> None:
    (model_folder / "chat_template.jinja").unlink()
    done = piped(model_folder, environment, b"hi\n")
    assert done.returncode == 2
    assert b"--template FILE" in done.stderr


def test_a_save_that_does_not_fit_leaves_the_old_file(start: Start, tmp_path: Path) -> None:
    terminal = start(FILE_SIZE="700")
    saved = tmp_path / "saved" / "chat.json"
    saved.parent.mkdir()
    terminal.ask("one", ANSWERED)
    terminal.ask(f"/save {saved}", "saved 1 turns")
    before = saved.read_text()
    terminal.ask("x" * 700, "not kept for --continue")
    terminal.ask(f"/save {saved}", "cannot be written: File too large")
    assert saved.read_text() == before
    assert list(saved.parent.iterdir()) == [saved]
    terminal.ask("/undo", "took back")
    terminal.ask("two", ANSWERED)


def test_a_full_disk_during_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.cli import session_file
    from medusa_cli.errors import StorageError

    path = tmp_path / "chat.json"
    session_file.save_json(path, {"old": 1})

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        session_file.save_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["chat.json"]


def test_history_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_cli.cli import session_file

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = session_file.history_file()
    entries = [f"\n# 2026-01-01 00:00:{i}\n+entry {i}\n" for i in range(1500)]
    path.write_text("".join(entries))
    assert session_file.history_file() == path
    kept = re.findall(r"^\+(entry \d+)$", path.read_text(), re.MULTILINE)
    assert kept == [f"entry {i}" for i in range(500, 1500)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
