"""`medusa bench` on the command line: formats, refusals, interrupts."""

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conftest import CONTEXT
from medusa_cli.bench import runner
from medusa_cli.bench.tables import Table
from medusa_cli.cli.bench_output import Findings, show
from medusa_cli.cli.bench_request import BenchFormat, parse_nodes, parse_temperatures
from medusa_cli.cli.streams import Streams
from medusa_cli.errors import UsageError
from medusa_cli.text.prompt_files import read_questions, spread
from test_cli import Outcome, medusa

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "bench.json").read_text())


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEDUSA_DEBUG", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"id": "a", "category": "x", "prompt": "abc"},
        {"id": "b", "category": "y", "messages": [{"role": "user", "content": "defg"}]},
        {"id": "c", "category": "x", "turns": ["hi", "and?"]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def bench(folder: Path, *arguments: str) -> Outcome:
    return medusa("bench", "-m", str(folder), "--offline", *arguments)


def small(folder: Path, prompts: Path, *arguments: str) -> Outcome:
    """A benchmark of a second or two."""
    limits = ("--prompts", str(prompts), "-n", "12", "--ignore-eos", "--warmup", "0")
    return bench(folder, *limits, *arguments)


def arms(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in report["arms"]}


def test_json_validates_against_the_schema(model_folder: Path, prompts: Path) -> None:
    outcome = small(
        model_folder, prompts, "--tree", "mc_sim_7b_63", "--against", "hf",
        "--against", "prompt-lookup", "--against", "llama-cpp", "--format", "json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    report = outcome.json
    jsonschema.validate(report, SCHEMA)
    assert report["complete"] is True
    found = arms(report)
    assert list(found) == ["plain", "mc_sim_7b_63", "hf", "prompt-lookup", "llama-cpp"]
    assert found["llama-cpp"]["status"] == "unavailable"
    assert len(report["samples"]) == 4 * 4, "four arms on four prompts, a turn each"
    for name in ("mc_sim_7b_63", "hf", "prompt-lookup"):
        equality = found[name]["equality"]
        assert (equality["reference"], equality["identical"]) == ("plain", 4), name
        assert found[name]["speedup"]["pairs"] == 3
    assert found["mc_sim_7b_63"]["accept"]["mean"] >= 1
    for sample in report["samples"]:
        assert len(sample["token_ids"]) == 12
        if sample["arm"] == "mc_sim_7b_63":
            assert sum(sample["accept_lengths"]) == 11
    assert set(report["hashes"]) == {"weights", "heads", "prompts"}


def test_trees_that_change_show_their_sizes(model_folder: Path, prompts: Path) -> None:
    both = ("--tree", "auto", "--tree", "mc_sim_7b_7")
    outcome = small(model_folder, prompts, *both, "--format", "json")
    assert outcome.code == 0, outcome.err
    report = outcome.json
    jsonschema.validate(report, SCHEMA)
    found = arms(report)
    assert list(found) == ["plain", "auto", "mc_sim_7b_7"]
    assert found["plain"]["nodes"] is None
    assert found["auto"]["tree"]["nodes"] == 64
    assert found["auto"]["equality"]["identical"] == 4
    fixed = found["mc_sim_7b_7"]["nodes"]
    assert fixed["max"] == 8
    assert fixed["over_time"][0] == pytest.approx(fixed["mean"], abs=1e-3)
    for sample in report["samples"]:
        told = 0 if sample["arm"] == "plain" else len(sample["accept_lengths"])
        assert len(sample["nodes"]) in (told, len(sample["accept_lengths"]))
    assert [row["nodes_mean"] is None for row in found["auto"]["categories"]] == [False, False]
    table = small(model_folder, prompts, *both).out
    assert "Tree nodes of a step, as answers go on" in table
    assert "Mean tree nodes of a step, by category" in table
    assert "Tree nodes" not in small(model_folder, prompts, "--tree", "mc_sim_7b_7").out


def test_the_schema_can_fail(model_folder: Path, prompts: Path) -> None:
    report = small(model_folder, prompts, "--limit", "1", "--format", "json").json
    report["arms"][0]["tokens_per_s"] = "fast"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, SCHEMA)


def test_the_table_names_baseline_interval_and_equality(model_folder: Path, prompts: Path) -> None:
    outcome = small(model_folder, prompts, "--tree", str(model_folder / "all.json"))
    assert outcome.code == 0, outcome.err
    plain = next(line for line in outcome.out.splitlines() if line.startswith("plain "))
    tree = next(line for line in outcome.out.splitlines() if line.startswith("all "))
    assert plain.split()[-1] == "reference"
    assert "[" in tree
    assert tree.split()[-1] == "4/4"
    assert "break-even at" in outcome.out
    assert "By category" in outcome.out
    assert "\x1b" not in outcome.out + outcome.err
    assert "medusa: a/1  plain" in outcome.err, "progress, a line each where there is no terminal"


@pytest.mark.parametrize(("columns", "blocks"), [(80, False), (28, True)])
def test_a_table_wider_than_the_terminal_is_shown_in_blocks(
    monkeypatch: pytest.MonkeyPatch, columns: int, blocks: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    cells = ("a [b] c", "1.00x [1, 2]", "8/8")
    table = Table("Title", ("arm", "speedup", "same"), (cells,))
    out = Terminal()
    show(Findings([table], {}), BenchFormat.TABLE, Streams(sys.stdin, out, sys.stderr))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert lines[0].strip() == "Title"
    assert all(len(line) <= columns for line in lines)
    assert ("   speedup  1.00x [1, 2]" in lines) is blocks
    assert any("a [b] c" in line for line in lines), "brackets are not markup"


def test_quiet_shows_no_progress(model_folder: Path, prompts: Path) -> None:
    assert small(model_folder, prompts, "--limit", "1", "-q").err == ""


def test_markdown_csv_and_files(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    outcome = small(model_folder, prompts, "--limit", "1", "--format", "md", "--export", str(file))
    assert "| arm | tok/s |" in outcome.out
    jsonschema.validate(json.loads(file.read_text()), SCHEMA)
    table = tmp_path / "report.csv"
    small(model_folder, prompts, "--limit", "1", "--export", str(table))
    assert table.read_text().splitlines()[0].startswith("table,arm,tok/s")


def test_two_acceptance_rules_are_two_arms(model_folder: Path, prompts: Path) -> None:
    report = small(
        model_folder, prompts, "--temperature", "1", "--acceptance", "lossless",
        "--acceptance", "typical", "--seed", "4", "--format", "json",
    ).json  # fmt: skip
    jsonschema.validate(report, SCHEMA)
    plain, lossless, typical = report["arms"]
    assert lossless["name"].endswith("lossless")
    assert lossless["equality"]["identical"] == 4, "seeded text does not depend on the tree"
    assert plain["lossy"] is lossless["lossy"] is False
    assert typical["lossy"] is True
    assert typical["equality"] is None
    assert any("lossy" in warning for warning in report["warnings"])


def test_the_models_own_sampling_values(model_folder: Path, prompts: Path) -> None:
    values = {"do_sample": True, "temperature": 0.7, "top_k": 40}
    (model_folder / "generation_config.json").write_text(json.dumps(values))
    settings = [
        small(model_folder, prompts, "--limit", "1", "--format", "json", *more).json["settings"]
        for more in ((), ("--model-defaults",), ("--model-defaults", "--top-k", "3"))
    ]
    assert [(s["temperature"], s["top_k"]) for s in settings] == [(0, 0), (0.7, 40), (0.7, 3)]


def test_a_tree_measured_on_the_prompts_it_was_built_from_is_said(
    model_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "own.json"
    common = ("-m", str(model_folder), "--offline")
    outcome = medusa("accuracy", *common, "--prompts", str(prompts), "-n", "12")
    assert outcome.code == 0, outcome.err
    outcome = medusa("tree", "build", *common, "--nodes", "4", "--out", str(tree))
    assert outcome.code == 0, outcome.err
    report = small(model_folder, prompts, "--tree", str(tree), "--format", "json").json
    assert any("built from these very prompts" in warning for warning in report["warnings"])
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "xyz"}))
    report = small(model_folder, other, "--tree", str(tree), "--format", "json").json
    assert not any("built from" in warning for warning in report["warnings"])


def test_without_baseline_there_is_no_speedup(model_folder: Path, prompts: Path) -> None:
    report = small(model_folder, prompts, "--no-baseline", "--limit", "2", "--format", "json").json
    assert [arm["kind"] for arm in report["arms"]] == ["medusa"]
    assert report["arms"][0]["speedup"] is None


def test_plain_alone_against_another_decoder(model_folder: Path, prompts: Path) -> None:
    report = small(model_folder, prompts, "--plain", "--against", "hf", "--format", "json").json
    assert list(arms(report)) == ["plain", "hf"]
    assert report["heads"] is None
    assert arms(report)["plain"]["over"]["hf"]["pairs"] == 3


def test_an_interrupt_prints_what_was_measured(
    model_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = runner.Runner._timed
    calls: list[int] = []

    def interrupted(self: runner.Runner, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        timed(self, *arguments)

    monkeypatch.setattr(runner.Runner, "_timed", interrupted)
    outcome = small(model_folder, prompts, "--format", "json")
    assert outcome.code == 130
    jsonschema.validate(outcome.json, SCHEMA)
    assert outcome.json["complete"] is False
    assert len(outcome.json["samples"]) == 5
    assert outcome.json["warnings"][0].startswith("partial")


def test_comparing_two_reports(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert small(model_folder, prompts, "--export", str(file)).code == 0
    outcome = medusa("bench", "--compare", *map(str, files), "--format", "json")
    assert outcome.code == 0, outcome.err
    plain, tree = outcome.json["arms"]
    assert plain["identical"] == tree["identical"] == 4
    assert plain["rate_change"]["pairs"] == 3
    assert plain["speedup_change"] is None
    assert tree["speedup_change"]["low"] <= tree["speedup_change"]["high"]
    changed = json.loads(files[1].read_text())
    changed["environment"]["dtype"] = "float16"
    changed["samples"][0]["token_ids"][3] += 1
    files[1].write_text(json.dumps(changed))
    shown = medusa("bench", "--compare", *map(str, files))
    assert "differs: dtype: float32 > float16" in shown.out
    assert "3/4" in shown.out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "medusa.bench/1"}'])
def test_what_is_no_report_is_not_compared(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    outcome = medusa("bench", "--compare", str(file), str(file))
    assert outcome.code == 2
    assert str(file) in outcome.err


def test_sweeping_nodes(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    plot = tmp_path / "nodes.png"
    outcome = bench(
        model_folder, "--sweep-nodes", "1,2,...,4", "--prompts", str(prompts), "-n", "12",
        "--format", "json", "--plot", str(plot),
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    points = outcome.json["points"]
    assert {point["asked"] for point in points} == {1, 2, 4}
    assert {point["shape"] for point in points} == {"built", "dense", "adaptive"}
    for point in points:
        assert point["nodes"] <= point["asked"]
        assert point["tokens_per_s"] == pytest.approx(
            point["accept_length"] / point["step_seconds"]
        )
    best = max(points, key=lambda point: point["tokens_per_s"])
    assert outcome.json["best"]["nodes"] == best["nodes"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "step costs kept in" in outcome.err


def test_sweeping_temperatures(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    plot = tmp_path / "temperatures.svg"
    outcome = bench(
        model_folder, "--sweep-temperature", "0,1", "--prompts", str(prompts), "-n", "12",
        "--seed", "2", "--limit", "2", "--format", "json", "--plot", str(plot),
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    rows = [(row["temperature"], row["rule"]) for row in outcome.json["points"]]
    assert rows == [(0, "lossless"), (1, "lossless"), (1, "typical")]
    assert [row["kl_nats_per_token"] > 0 for row in outcome.json["points"]] == [False, False, True]
    assert "<svg" in plot.read_text()


def refused(*arguments: str) -> str:
    outcome = medusa("bench", "-m", "nowhere", *arguments)
    assert outcome.code == 2, outcome.err
    assert len(outcome.err.splitlines()) <= 2
    return outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--roofline", "--sweep-nodes", "1,2"), "separate runs"),
        (("--roofline", "--against", "hf"), "--against means nothing to --roofline"),
        (("--sweep-nodes", "1,2", "--temperature", "1"), "--temperature means nothing"),
        (("--sweep-temperature", "0", "--acceptance", "typical"), "--acceptance means nothing"),
        (("--plot", "x.png"), "--plot means nothing to a plain benchmark"),
        (("--compare", "a.json", "b.json", "--limit", "3"), "means nothing to --compare"),
        (("--against", "vllm"), "--against must be one of"),
        (("--acceptance", "typical"), "needs a temperature above 0"),
        (("--limit", "-1"), "--limit must be at least 0"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--export", "report.txt"), "--export takes a file that ends in"),
        (("--export", "/nowhere/report.md"), "there is no folder"),
        (("--roofline", "--plot", "x.doc"), "--plot takes a file that ends in"),
        (("--sweep-nodes", "0,1"), "whole numbers from 1"),
        (("--sweep-temperature", "warm"), "numbers from 0 on"),
        (("--sweep-temperature", ""), "numbers from 0 on"),
        (("--prompts", "/nowhere.jsonl"), "cannot be read"),
        (("--plain", "--tree", "mc_sim_7b_63"), "--plain decodes without"),
    ],
)
def test_what_would_be_ignored_or_is_wrong_is_refused(arguments: Sequence[str], said: str) -> None:
    assert said in refused(*arguments)


def test_a_tree_too_deep_is_refused_before_any_run(model_folder: Path, tmp_path: Path) -> None:
    tree = tmp_path / "deep.json"
    tree.write_text(json.dumps([[0] * n for n in range(1, 7)]))
    outcome = bench(model_folder, "--tree", str(tree))
    assert outcome.code == 3
    assert "6 deep" in outcome.err or "goes 5 deep" in outcome.err


def test_node_lists() -> None:
    assert parse_nodes("1,2,4,...,128") == [1, 2, 4, 8, 16, 32, 64, 128]
    assert parse_nodes("8, 1") == [1, 8]
    assert parse_nodes("10,20,...,45") == [10, 20, 40, 45]
    assert parse_nodes("4,6,...,12") == [4, 6, 8, 10, 12]
    for text in ("", "a", "...,4", "1,...,4", "4,2,...,8", "1,2,...", "2000"):
        with pytest.raises(UsageError, match="--sweep-nodes"):
            parse_nodes(text)


def test_temperature_lists() -> None:
    assert parse_temperatures("1,0,0.3") == [0.0, 0.3, 1.0]
    for text in ("", "a", "-1", "nan", "inf"):
        with pytest.raises(UsageError, match="--sweep-temperature"):
            parse_temperatures(text)


def test_builtin_prompts() -> None:
    questions = read_questions("builtin")
    categories = [question.category for question in questions]
    assert len(set(categories)) == 8
    assert all(categories.count(category) == 8 for category in categories)
    assert sum(bool(question.follow_ups) for question in questions) >= 16
    for question in questions:
        if question.category == "summarisation":
            assert len(str(question.first).split()) >= 480, "at least 600 tokens"
    first = spread(questions, 8)
    assert len({question.category for question in first}) == 8


def test_a_prompt_beyond_the_context_is_skipped_and_said(
    model_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "long.jsonl"
    rows = [{"prompt": "a" * CONTEXT}, {"prompt": "abc"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    outcome = small(model_folder, file, "--format", "json")
    assert outcome.code == 0, outcome.err
    assert {sample["question"] for sample in outcome.json["samples"]} == {"2"}
    assert any("1 prompts do not fit" in warning for warning in outcome.json["warnings"])


def test_help_defines_the_accept_length() -> None:
    assert "accept length" in medusa("bench", "--help").out
