"""`medusa` on the command line, in this process: flags, formats, errors and exit codes."""

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from conftest import CONTEXT, byte_tokenizer, head_tensors, tiny_module
from medusa_cli import __version__, session
from medusa_cli.cli import answer, boundary
from medusa_cli.cli.app import app
from medusa_cli.config import Acceptance
from medusa_cli.errors import StorageError
from medusa_cli.models.registry import entries


class Outcome:
    """What one call left behind."""

    def __init__(self, result: Any) -> None:
        self.code: int = result.exit_code
        self.out: str = result.stdout
        self.err: str = result.stderr
        self.bytes: bytes = result.stdout_bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


def medusa(*arguments: str, stdin: str | bytes | None = None) -> Outcome:
    return Outcome(CliRunner().invoke(app, list(arguments), input=stdin, prog_name="medusa"))


def generate(folder: Path, *arguments: str, stdin: str | bytes | None = None) -> Outcome:
    return medusa("generate", "-m", str(folder), "--offline", *arguments, stdin=stdin)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDUSA_DEBUG", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_help_and_version() -> None:
    assert medusa("--version").out == f"medusa {__version__}\n"
    assert "generate" in medusa("--help").out
    assert medusa().out == medusa("--help").out
    assert medusa("generate", "--help").code == 0


def test_stdout_is_the_completion_and_nothing_else(model_folder: Path) -> None:
    limits = ("-n", "30", "--ignore-eos", "--raw")
    outcome = generate(model_folder, *limits, stdin="Hello")
    assert outcome.code == 0
    assert outcome.err == ""
    model = session.load(str(model_folder), plain=True)
    ids = model.base.module.generate(
        torch.tensor([list(b"Hello")]), max_new_tokens=30, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[0, 5:]  # fmt: skip
    expected = byte_tokenizer().decode(ids, skip_special_tokens=True)
    assert outcome.bytes == expected.encode()


@pytest.mark.parametrize("arguments", [("--plain",), ("--tree", "mc_sim_7b_63"), ("--heads", "?")])
def test_every_way_of_decoding_gives_the_same_text(
    model_folder: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    torch.save(head_tensors(2), tmp_path / "v1.pt")
    arguments = tuple(str(tmp_path / "v1.pt") if a == "?" else a for a in arguments)
    usual = generate(model_folder, "-p", "Hi", "-n", "25")
    assert generate(model_folder, "-p", "Hi", "-n", "25", *arguments).out == usual.out
    sampled = ("-p", "Hi", "-n", "25", "--temperature", "0.9", "--seed", "5")
    assert generate(model_folder, *sampled).out != usual.out
    assert generate(model_folder, *sampled).out == generate(model_folder, *sampled, *arguments).out


def test_prompt_sources(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello\n")
    fixed = ("-n", "12", "--raw", "--ignore-eos")
    expected = generate(model_folder, *fixed, "-p", "Hello").out
    assert generate(model_folder, *fixed, "-f", str(file)).out == expected
    assert generate(model_folder, *fixed, "-f", "-", stdin="Hello\n").out == expected
    assert generate(model_folder, *fixed, stdin="Hello").out == expected
    both = generate(model_folder, *fixed, "-p", "b", stdin="a\n").out
    assert both == generate(model_folder, *fixed, stdin="a\n\nb").out


def test_json_report(model_folder: Path) -> None:
    outcome = generate(model_folder, "-p", "Hi", "-n", "20", "--ignore-eos", "--format", "json")
    report = outcome.json
    assert report["schema"] == "medusa.generate/1"
    assert report["mode"] == "medusa"
    assert report["model"] == report["heads"] == str(model_folder)
    assert report["tree"] == {"name": "mc_sim_7b_7", "nodes": 8, "depth": 3}
    assert report["sampling"]["temperature"] == 0.0
    assert report["sampling"]["acceptance"] == "lossless"
    assert report["finish_reason"] == "length"
    assert report["usage"]["completion_tokens"] == len(report["token_ids"]) == 20
    lengths = report["accept"]["lengths"]
    assert report["usage"]["steps"] == len(lengths)
    assert report["accept"]["mean"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)
    assert sum(report["accept"]["histogram"].values()) == len(lengths)
    assert len(report["nodes"]["per_step"]) == len(lengths)
    assert report["nodes"]["per_step"][0] == 8
    assert report["nodes"]["mean"] <= 8
    assert set(report["timing"]) == {"load_s", "ttft_s", "decode_s", "tokens_per_s", "step_ms"}
    assert set(report["timing"]["step_ms"]) == {"mean", "p50", "p95"}
    assert report["memory"]["peak_bytes"] > 0
    assert set(report["versions"]) == {"medusa", "torch", "transformers", "python"}
    text = generate(model_folder, "-p", "Hi", "-n", "20", "--ignore-eos").out
    assert report["text"] == text


@pytest.mark.parametrize("lookup", ["--lookup", "--no-lookup"])
@pytest.mark.parametrize("tree", ["auto", "mc_sim_7b_7"])
def test_no_tree_and_no_lookup_changes_the_text(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tree: str, lookup: str
) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    fixed = ("-p", "Hi " * 9, "-n", "30", "--ignore-eos", "--format", "json")
    plain = generate(model_folder, *fixed, "--plain").json
    outcome = generate(model_folder, *fixed, "--tree", tree, lookup)
    assert outcome.code == 0, outcome.err
    report = outcome.json
    assert report["token_ids"] == plain["token_ids"]
    assert report["tree"]["name"] == tree
    if tree == "auto":
        assert report["tree"] == {"name": "auto", "nodes": 64, "depth": 4}
        assert "`medusa accuracy`" in outcome.err, "these heads are not calibrated"
        assert "step costs kept in" in outcome.err
        assert generate(model_folder, *fixed, "--tree", tree, "--quiet").err == ""
    else:
        assert (max(report["nodes"]["per_step"]) > 8) == (lookup == "--lookup")


def test_plain_json_has_neither_heads_nor_tree(model_folder: Path) -> None:
    report = generate(model_folder, "-p", "Hi", "-n", "4", "--plain", "--format", "json").json
    assert (report["mode"], report["heads"], report["tree"]) == ("plain", None, None)
    assert set(report["accept"]["lengths"]) <= {1}


def test_jsonl_streams_events(model_folder: Path) -> None:
    outcome = generate(model_folder, "-p", "Hi", "-n", "20", "--ignore-eos", "--format", "jsonl")
    start, *steps, end = (json.loads(line) for line in outcome.out.splitlines())
    assert start["event"] == "start"
    assert end["event"] == "end"
    assert {step["event"] for step in steps} == {"step"}
    assert "".join(step["text"] for step in steps) == end["text"]
    assert [t for step in steps for t in step["token_ids"]] == end["token_ids"]
    assert [step["accept"] for step in steps] == [0, *end["accept"]["lengths"]]
    assert [step["nodes"] for step in steps] == [0, *end["nodes"]["per_step"]]


def test_the_chosen_seed_is_reported_and_repeats_the_text(model_folder: Path) -> None:
    arguments = ("-p", "Hi", "-n", "20", "--temperature", "1", "--format", "json")
    report = generate(model_folder, *arguments).json
    again = generate(model_folder, *arguments, "--seed", str(report["sampling"]["seed"])).json
    assert again["token_ids"] == report["token_ids"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--top-p", "0.3"),
        ("--top-k", "2"),
        ("--min-p", "0.5"),
        ("--typical-p", "0.2"),
        ("--eta-cutoff", "0.3"),
        ("--epsilon-cutoff", "0.2"),
        ("--repetition-penalty", "3"),
        ("--acceptance", "typical"),
        ("--acceptance", "typical", "--epsilon", "0.01"),
        ("--acceptance", "typical", "--delta", "0.99", "--epsilon", "1"),
        ("--acceptance", "typical", "--greedy-root"),
        ("--seed", "12"),
    ],
)
def test_every_sampling_flag_reaches_the_sampler(
    model_folder: Path, arguments: tuple[str, ...]
) -> None:
    """At a high temperature each of them changes the text of some prompt."""
    common = ("--temperature", "1.5", "-n", "40", "--ignore-eos")
    seed = () if "--seed" in arguments else ("--seed", "11")
    given = generate(model_folder, "-p", "Hi", *common, *seed, *arguments)
    assert given.code == 0
    assert "no effect" not in given.err
    assert given.out != generate(model_folder, "-p", "Hi", *common, "--seed", "11").out


def test_lossy_acceptance_is_labelled(model_folder: Path) -> None:
    arguments = ("-p", "Hi", "-n", "4", "--temperature", "1", "--format", "json")
    typical = ("--acceptance", "typical")
    assert generate(model_folder, *arguments, *typical).json["sampling"]["lossy"] is True
    assert generate(model_folder, *arguments).json["sampling"]["lossy"] is False


def test_options_without_effect_are_said(model_folder: Path) -> None:
    outcome = generate(model_folder, "-p", "Hi", "-n", "2", "--top-p", "0.5")
    assert outcome.err == "medusa: --top-p has no effect at temperature 0\n"
    assert generate(model_folder, "-p", "Hi", "-n", "2", "--top-p", "0.5", "-q").err == ""
    outcome = generate(model_folder, "-p", "Hi", "-n", "2", "--trace")
    assert "--trace" in outcome.err


def test_model_defaults_are_taken_when_asked_for(model_folder: Path) -> None:
    path = model_folder / "generation_config.json"
    values = json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.7, "top_k": 9}
    path.write_text(json.dumps(values))
    arguments = ("-p", "Hi", "-n", "2", "--format", "json")
    assert generate(model_folder, *arguments).json["sampling"]["temperature"] == 0.0
    sampling = generate(model_folder, *arguments, "--model-defaults").json["sampling"]
    assert (sampling["temperature"], sampling["top_k"]) == (0.7, 9)
    arguments += ("--model-defaults", "--temperature", "0.2")
    assert generate(model_folder, *arguments).json["sampling"]["temperature"] == 0.2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--device", "cpu"),
        ("--device-map", "auto"),
        ("--dtype", "float32"),
        ("--trust-remote-code",),
        ("--revision", "main"),
    ],
)
def test_loading_flags_load_the_same_model(model_folder: Path, arguments: tuple[str, ...]) -> None:
    usual = generate(model_folder, "-p", "Hi", "-n", "9")
    given = generate(model_folder, "-p", "Hi", "-n", "9", *arguments)
    assert (given.code, given.out) == (0, usual.out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_agrees_with_itself(model_folder: Path, dtype: str) -> None:
    arguments = ("-p", "Hi", "-n", "9", "--dtype", dtype)
    given = generate(model_folder, *arguments)
    assert given.code == 0
    assert given.out == generate(model_folder, *arguments, "--plain").out


def test_system_template_and_stop(model_folder: Path, tmp_path: Path) -> None:
    usual = generate(model_folder, "-p", "Hi", "-n", "30", "--ignore-eos")
    with_system = generate(model_folder, "-p", "Hi", "-n", "30", "--ignore-eos", "--system", "Be.")
    assert with_system.out != usual.out
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    templated = generate(
        model_folder, "-p", "Hi", "-n", "30", "--ignore-eos", "--template", str(template)
    )
    raw = generate(model_folder, "-p", "Hi", "-n", "30", "--ignore-eos", "--raw")
    assert templated.out == raw.out
    stop = next(usual.out[i] for i in range(5, 30) if usual.out[i].isascii())
    stopped = generate(model_folder, "-p", "Hi", "-n", "30", "--ignore-eos", "--stop", stop)
    assert stopped.out == usual.out[: usual.out.index(stop)]


def test_context_fills_with_exit_code_0(model_folder: Path) -> None:
    prompt = "x" * (CONTEXT - 4)
    arguments = ("--raw", "--ignore-eos", "--format", "json")
    report = generate(model_folder, "-p", prompt, *arguments).json
    assert report["finish_reason"] == "context"
    assert report["usage"]["completion_tokens"] == 4
    outcome = generate(model_folder, "-p", "x" * CONTEXT, *arguments)
    assert outcome.code == 4
    assert "--on-overflow truncate-left" in outcome.err
    arguments += ("--on-overflow", "truncate-left")
    assert generate(model_folder, "-p", "x" * CONTEXT, *arguments).code == 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (("-p", ""), "", "the prompt is empty"),
        (("-p", "  \n"), "", "the prompt is empty"),
        ((), "\n\n", "the prompt is empty"),
        ((), b"caf\xe9", "standard input is not UTF-8 (byte 3)"),
        (("-p", "caf\udce9"), "", "-p is not UTF-8"),
        (("-f", "/no/such/file"), None, "cannot be read"),
        (("-p", "x", "-n", "0"), "", "--max-new-tokens must be at least 1"),
        (("-p", "x", "--stop", ""), "", "--stop must not be empty"),
        (("-p", "x", "--temperature", "-1"), "", "--temperature must be at least 0"),
        (("-p", "x", "--top-p", "2"), "", "--top-p must be in (0, 1]"),
        (("-p", "x", "--acceptance", "typical"), "", "needs a temperature above 0"),
        (("-p", "x", "--plain", "--tree", "mc_sim_7b_63"), "", "drop --heads and --tree"),
        (("-p", "x", "--device", "cpu", "--device-map", "auto"), "", "drop --device"),
        (("-p", "x", "--device", "cuda:9"), "", "no such device"),
        (("-p", "x", "--device-map", "everywhere"), "", "--device-map must be one of"),
        (("-p", "x", "--trace", "--format", "json"), "", "drop --batch and --format"),
        (("-p", "x", "--dtype", "int3"), "", "--dtype must be auto"),
        (("-p", "x", "--raw", "--system", "s"), "", "drop --system"),
        (("-p", "x", "--batch", "f"), "", "drop -p and -f"),
        (("-p", "x", "--nonsense"), "", "No such option"),
        (("-p", "x", "--format", "xml"), "", "xml"),
        (("-p", "x", "--tree", "nope"), "", "no tree 'nope'"),
        (("-p", "x", "--plain", "--lookup"), "", "drop --lookup"),
    ],
)
def test_usage_errors_are_one_or_two_lines(
    model_folder: Path, arguments: tuple[str, ...], stdin: str | bytes | None, said: str
) -> None:
    outcome = generate(model_folder, *arguments, stdin=stdin)
    assert outcome.code == (3 if "tree 'nope'" in said else 2)
    assert said in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    assert outcome.out == ""


def test_chat_without_a_template_says_what_to_do(model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").unlink()
    assert generate(model_folder, "-p", "x", "-n", "2").code == 0
    for arguments in (("--chat",), ("--system", "s")):
        outcome = generate(model_folder, "-p", "x", "-n", "2", *arguments)
        assert outcome.code == 2
        assert "--template FILE" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-m", "nope"), "no model 'nope'"),
        (("-m", "lmsys/vicuna-7b-v1.3"), "offline"),
        (("-m", "vicuna-7b"), "offline"),
        (("--heads", "nope"), "no heads 'nope'"),
        (("--heads", "BROKEN"), "cannot be read as a checkpoint"),
        (("--heads", "WRONG"), "belong to another base model"),
        (("--tree", "nope"), "no tree 'nope'"),
        (("--tree", "BROKEN"), "cannot be read as JSON"),
    ],
)
def test_missing_and_broken_parts_exit_with_3(
    model_folder: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    broken, wrong = tmp_path / "broken.safetensors", tmp_path / "wrong.pt"
    broken.write_bytes(b"\xff\xff")
    torch.save(head_tensors(1, rows=9), wrong)
    files = {"BROKEN": str(broken), "WRONG": str(wrong)}
    outcome = generate(model_folder, "-p", "x", *(files.get(a, a) for a in arguments))
    assert outcome.code == 3
    assert said in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


def test_a_plain_model_without_heads_exits_with_3(tmp_path: Path) -> None:
    tiny_module().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    outcome = generate(tmp_path, "-p", "x")
    assert outcome.code == 3
    assert "--plain" in outcome.err
    assert generate(tmp_path, "-p", "x", "-n", "3", "--plain").code == 0


def test_a_config_that_disagrees_with_the_heads_is_a_warning(
    model_folder: Path, tmp_path: Path
) -> None:
    torch.save(head_tensors(4), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    outcome = generate(model_folder, "--heads", str(tmp_path), "-p", "x", "-n", "2")
    assert outcome.code == 0
    assert "says 2 heads, their tensors hold 4" in outcome.err


class TestBatch:
    """`--batch`: a prompt a line in, a JSON object a line out."""

    def lines(self, outcome: Outcome) -> list[dict[str, Any]]:
        return [json.loads(line) for line in outcome.out.splitlines()]

    def test_objects_come_in_order_with_their_ids(self, model_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "batch.jsonl"
        rows: list[dict[str, Any]] = [
            {"id": "b", "prompt": "Hi"},
            {"messages": [{"role": "user", "content": "Hi"}]},
            {"id": 7, "prompt": "a line\u2028separator"},
        ]
        file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
        outcome = generate(model_folder, "--batch", str(file), "-n", "9")
        assert outcome.code == 0
        first, second, third = self.lines(outcome)
        assert (first["id"], third["id"]) == ("b", 7)
        assert "id" not in second
        assert first["token_ids"] == second["token_ids"]
        single = generate(model_folder, "-p", "Hi", "-n", "9", "--format", "json").json
        assert first["token_ids"] == single["token_ids"]

    def test_one_failing_prompt_does_not_stop_the_rest(
        self, model_folder: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "batch.jsonl"
        rows = [{"id": 1, "prompt": "x" * CONTEXT}, {"id": 2, "prompt": "x"}]
        file.write_text("\n".join(map(json.dumps, rows)))
        outcome = generate(model_folder, "--batch", str(file), "-n", "3")
        failed, fine = self.lines(outcome)
        assert outcome.code == 4
        assert failed["id"] == 1
        assert "context" in failed["error"]
        assert len(fine["token_ids"]) <= 3

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("{", "line 2 is not JSON"),
            ("[1]", "line 2 must be an object"),
            ('{"prompt": "x", "messages": []}', "either 'prompt' or 'messages'"),
            ('{"prompt": 3}', "'prompt' must be text"),
            ('{"prompt": " "}', "'prompt' must be text and not empty"),
            ('{"messages": []}', "'messages' must be a list"),
            ('{"messages": [{"role": "king", "content": "x"}]}', "each message needs a 'role'"),
            ('{"messages": [{"role": "user"}]}', "'content'"),
        ],
    )
    def test_a_bad_line_is_named_before_anything_runs(
        self, model_folder: Path, tmp_path: Path, line: str, said: str
    ) -> None:
        file = tmp_path / "batch.jsonl"
        file.write_text('{"prompt": "fine"}\n' + line)
        outcome = generate(model_folder, "--batch", str(file))
        assert (outcome.code, outcome.out) == (2, "")
        assert said in outcome.err

    def test_an_empty_file_is_a_usage_error(self, model_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text("\n")
        assert generate(model_folder, "--batch", str(tmp_path / "empty.jsonl")).code == 2


class TestModels:
    """`medusa models`."""

    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
        return tmp_path

    def test_lists_every_alias(self) -> None:
        table = medusa("models").out
        rows = json.loads(medusa("models", "--format", "json").out)
        assert [row["name"] for row in rows] == list(entries())
        for row in rows:
            assert row["name"] in table
            assert row["source"] in table
            assert row["heads"] in table

    def test_fetch_and_remove(self, cache: Path) -> None:
        folder = cache / "models" / "smollm2-135m"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("x" * 1000)
        assert "1.0 kB" in medusa("models").out
        assert medusa("models", "fetch", "smollm2-135m").out == f"{folder}\n"
        assert medusa("models", "rm", "smollm2-135m").out == "removed smollm2-135m: 1.0 kB\n"
        assert not folder.exists()
        again = medusa("models", "rm", "smollm2-135m")
        assert (again.code, again.out) == (3, "")
        assert medusa("models", "rm", "nope").code == 3


class TestBoundary:
    """Errors become messages and exit codes in one place."""

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (torch.OutOfMemoryError("CUDA out of memory"), 1, "out of GPU memory"),
            (MemoryError(), 1, "out of memory"),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "out of memory"),
            (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, "the disk is full (/x)"),
            (StorageError("too full"), 1, "too full"),
            (ValueError("surprise\nmore"), 1, "surprise (MEDUSA_DEBUG=1 shows where)"),
            (KeyboardInterrupt(), 130, ""),
        ],
    )
    def test_what_a_command_raises(
        self,
        model_folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
        code: int,
        said: str,
    ) -> None:
        def fail(*_args: Any, **_kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(answer.Answerer, "one", fail)
        outcome = generate(model_folder, "-p", "x")
        assert outcome.code == code
        assert said in outcome.err
        assert "Traceback" not in outcome.err
        assert len(outcome.err.splitlines()) <= 2

    def test_debug_shows_the_traceback(
        self, model_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_args: Any, **_kwargs: Any) -> None:
            raise ValueError("surprise")

        monkeypatch.setattr(answer.Answerer, "one", fail)
        monkeypatch.setenv("MEDUSA_DEBUG", "1")
        arguments = ["generate", "-m", str(model_folder), "-p", "x"]
        with pytest.raises(ValueError, match="surprise"):
            CliRunner().invoke(app, arguments, catch_exceptions=False)

    def test_every_error_of_ours_has_its_code(self) -> None:
        assert boundary.exit_code(StorageError("x")) == 1


def test_acceptance_values_are_the_contracts() -> None:
    assert [str(rule) for rule in Acceptance] == ["lossless", "typical"]


def test_no_prompt_on_a_terminal_is_a_usage_error(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    runner_stdin = Terminal(io.BytesIO(b""))
    monkeypatch.setattr(
        "medusa_cli.cli.streams.Streams.of_process",
        classmethod(lambda cls: cls(runner_stdin, sys.stdout, sys.stderr)),
    )
    outcome = generate(model_folder)
    assert outcome.code == 2
    assert "no prompt: give -p TEXT" in outcome.err


def test_offline_is_told_to_the_hub(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    generate(model_folder, "-p", "x", "-n", "1")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
