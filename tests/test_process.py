"""`medusa` as a process: pipes, signals, terminals, start-up, and the installed wheel."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MEDUSA = (sys.executable, "-m", "medusa_cli")
ESCAPE = b"\x1b"


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of a plain terminal session, offline."""
    kept = {name: value for name, value in os.environ.items() if name != "MEDUSA_DEBUG"}
    return kept | {"HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}


def generate(folder: Path, *arguments: str) -> list[str]:
    tree = ("--tree", str(folder / "all.json"))
    return [*MEDUSA, "generate", "-m", str(folder), "--ignore-eos", *tree, *arguments]


def test_piped_output_holds_no_escape_code(
    model_folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        done = subprocess.run(
            generate(model_folder, "-n", "20"), input=b"Hello", stdout=out, stderr=err,
            env=environment, check=False,
        )  # fmt: skip
    assert done.returncode == 0
    written = (tmp_path / "out").read_bytes()
    assert written
    assert ESCAPE not in written
    assert (tmp_path / "err").read_bytes() == b""


def test_a_closed_pipe_ends_silently_with_0(
    model_folder: Path, environment: dict[str, str]
) -> None:
    process = subprocess.Popen(
        generate(model_folder, "-n", "100", "-p", "Hi", "--format", "jsonl"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "start"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_a_full_disk_is_one_line(model_folder: Path, environment: dict[str, str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            generate(model_folder, "-n", "5", "-p", "Hi"), stdin=subprocess.DEVNULL, stdout=full,
            stderr=subprocess.PIPE, env=environment, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "medusa: the disk is full (output): make room and try again\n"


SLOW_PROMPT = ("-n", "100", "-p", "Hi", "--format", "json")
# Runs the command line on a model that takes half a second for each verification.
SLOW_MODEL = """
import time
from medusa_cli.decoding import decode
verify = decode.verify
def slow(*arguments):
    print("verify", file=__import__("sys").stderr, flush=True)
    time.sleep(0.5)
    return verify(*arguments)
decode.verify = slow
from medusa_cli.cli.app import main
main()
"""


def start_slow(folder: Path, environment: dict[str, str], *arguments: str) -> Any:
    command = [sys.executable, "-c", SLOW_MODEL, *generate(folder, *arguments)[len(MEDUSA) :]]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for _ in range(3):
        assert process.stderr.readline() == "verify\n"
    return process


def test_an_interrupt_still_prints_the_json_report(
    model_folder: Path, environment: dict[str, str]
) -> None:
    process = start_slow(model_folder, environment, *SLOW_PROMPT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(out)
    assert report["finish_reason"] == "interrupted"
    assert len(report["token_ids"]) < 100
    assert "Traceback" not in err


def test_an_interrupted_benchmark_prints_what_was_measured(
    model_folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"prompt {i}"}) for i in range(500)))
    process = subprocess.Popen(
        [*MEDUSA, "bench", "-m", str(model_folder), "--prompts", str(prompts), "--limit", "0",
         "-n", "50", "--ignore-eos", "--format", "json"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("medusa: 3/1"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    report = json.loads(out)
    assert report["complete"] is False
    assert len(report["samples"]) >= 5
    assert report["arms"][1]["equality"]["divergences"] == []
    assert "Traceback" not in err


def test_a_second_interrupt_leaves_at_once(model_folder: Path, environment: dict[str, str]) -> None:
    process = start_slow(model_folder, environment, *SLOW_PROMPT)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err


def run_in_terminal(
    command: list[str], environment: dict[str, str], *, columns: int = 60, rows: int = 24
) -> tuple[int, bytes]:
    """Exit code and all bytes that a command writes to a terminal of its own."""
    process_id, terminal = pty.fork()
    if process_id == 0:
        os.execvpe(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    written = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # how a terminal whose other side has gone ends on Linux
            chunk = b""
        if not chunk:
            break
        written += chunk
    _, status = os.waitpid(process_id, 0)
    return os.waitstatus_to_exitcode(status), written


def without_footer(written: bytes) -> str:
    """What stays on the screen: text without the footer's lines, styles and cursor movement."""
    text = written.decode()
    text = re.sub(r"\x1b7\x1b\[B\r\x1b\[2K[^\n]*?\x1b8", "", text)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[78DM]", "", text)
    return text.replace("\r\n", "\n")


def test_terminal_shows_text_and_footer(model_folder: Path, environment: dict[str, str]) -> None:
    arguments = generate(model_folder, "-n", "40", "-p", "Hi", "--raw")
    code, written = run_in_terminal(arguments, environment)
    assert code == 0
    assert b"tokens/s" in written
    piped = subprocess.run(
        arguments, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=True
    ).stdout.decode()
    pictured = "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in piped)
    pictured = re.sub("[\x80-\x9f]", "", pictured).replace("\x7f", "␡")
    screen = without_footer(written)
    assert f"{pictured}\n40 tokens · " in screen
    assert screen.endswith("length\n")


def test_terminal_without_footer(model_folder: Path, environment: dict[str, str]) -> None:
    quiet = generate(model_folder, "-n", "10", "-p", "Hi", "-q")
    _, written = run_in_terminal(quiet, environment)
    assert ESCAPE not in written
    assert b"tokens" not in written
    dumb = environment | {"TERM": "dumb"}
    _, written = run_in_terminal(generate(model_folder, "-n", "10", "-p", "Hi"), dumb)
    assert b"\x1b7" not in written


def test_no_footer_line_is_wider_than_the_terminal(
    model_folder: Path, environment: dict[str, str]
) -> None:
    _, written = run_in_terminal(
        generate(model_folder, "-n", "40", "-p", "Hi"), environment, columns=20
    )
    footers = re.findall(r"\x1b\[2K\x1b\[2m([^\x1b]+)", written.decode())
    assert footers
    assert max(map(len, footers)) < 20


def test_trace_colours_accepted_drafts(model_folder: Path, environment: dict[str, str]) -> None:
    """The tree of every single token accepts one draft at every step."""
    arguments = generate(model_folder, "-n", "20", "-p", "Hi", "--trace", "--raw")
    _, coloured = run_in_terminal(arguments, environment)
    assert b"\x1b[32m" in coloured
    _, plain = run_in_terminal(arguments, environment | {"NO_COLOR": "1"})
    assert b"\x1b[32m" not in plain
    assert b"\x1b[4m" in plain


def test_no_prompt_on_a_terminal_never_waits(
    model_folder: Path, environment: dict[str, str]
) -> None:
    code, written = run_in_terminal(generate(model_folder), environment)
    assert code == 2
    assert b"no prompt" in written


def test_help_imports_no_torch() -> None:
    helps = [[name, "--help"] for name in ("generate", "bench", "accuracy", "tree")]
    for command in (["--help"], *helps, ["models"], ["--version"]):
        script = (
            "import sys; from medusa_cli.cli.app import app\n"
            f"try: app({command!r})\n"
            "except SystemExit as e: assert not e.code\n"
            "heavy = {'torch', 'transformers', 'rich'} & set(sys.modules)\n"
            "sys.exit(f'imported {heavy}' if heavy else 0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_wheel_brings_everything(
    model_folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Built, unpacked elsewhere and run from another folder, it finds trees, heads, templates."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(ROOT)], check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    check = (
        "import medusa_cli, sys\n"
        "from medusa_cli.decoding.tree import shipped_trees\n"
        "from medusa_cli.models.registry import builtin_heads, entries\n"
        "from medusa_cli.text.prompts import shipped_template\n"
        f"assert medusa_cli.__file__.startswith({str(site)!r}), medusa_cli.__file__\n"
        "assert len(shipped_trees()) >= 11, shipped_trees()\n"
        "assert shipped_template('vicuna')\n"
        "assert (builtin_heads(entries()['smollm2-135m'].heads) / 'config.json').is_file()\n"
    )
    elsewhere = environment | {"PYTHONPATH": str(site)}
    run = {"cwd": tmp_path, "env": elsewhere, "check": True, "capture_output": True}
    subprocess.run([sys.executable, "-c", check], **run)
    command = [*MEDUSA, "generate", "-m", str(model_folder), "-p", "Hi", "-n", "8"]
    subprocess.run([*command, "--tree", "mc_sim_7b_63"], **run)
