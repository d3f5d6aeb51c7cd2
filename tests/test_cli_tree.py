"""`medusa accuracy` and `medusa tree` on the command line, in this process."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import save_file

import medusa_cli
from conftest import CONTEXT, head_tensors
from medusa_cli.bench.tree_plot import node_rows, save_plot, tree_figure
from medusa_cli.cli.tree_view import tree_lines
from medusa_cli.config import Limits
from medusa_cli.decoding.traces import from_json, mean_accept_length
from medusa_cli.decoding.tree import ROOT_ONLY, dense_tree, load_tree, shipped_trees, static_tree
from medusa_cli.text.prompt_files import read_questions
from medusa_cli.training.accuracy import prompts_digest
from test_cli import Outcome, medusa

ROWS = [
    {"id": "a", "category": "short", "prompt": "Hello"},
    {"id": "b", "category": "long", "turns": ["One, two", "three"]},
    {"id": "c", "category": "long", "prompt": "(x y)"},
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEDUSA_DEBUG", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def accuracy(folder: Path, prompts: Path, *arguments: str) -> Outcome:
    fixed = ("-m", str(folder), "--offline", "--prompts", str(prompts), "-n", "12")
    return medusa("accuracy", *fixed, *arguments)


def build(folder: Path, *arguments: str) -> Outcome:
    return medusa("tree", "build", "-m", str(folder), "--offline", *arguments)


class TestAccuracy:
    """`medusa accuracy`."""

    def test_measures_and_keeps_traces_beside_the_heads(
        self, model_folder: Path, prompts: Path
    ) -> None:
        outcome = accuracy(model_folder, prompts)
        assert outcome.code == 0
        traces = from_json((model_folder / "traces.json").read_text(), "x")
        assert [(text.id, text.turn) for text in traces.texts] == [
            ("a", 0),
            ("b", 0),
            ("b", 1),
            ("c", 0),
        ]
        digest = prompts_digest(read_questions(str(prompts)))
        assert traces.provenance.prompts_digest == digest
        assert (traces.provenance.prompts, traces.provenance.base) == ("prompts.jsonl", "tiny")
        mean = mean_accept_length(load_tree("mc_sim_7b_7"), traces)
        for said in (
            "top-1",
            "top-10",
            "head 4",
            "long",
            f"{traces.positions} positions in 4 answers",
            f"prompts {digest} (prompts.jsonl)",
            f"mean accept length {mean:.2f} with tree mc_sim_7b_7",
        ):
            assert said in outcome.out
        assert "PARTIAL" not in outcome.out
        lines = outcome.err.splitlines()
        assert lines[:3] == [f"medusa: prompt {n} of 3: {id_}" for n, id_ in enumerate("abc", 1)]
        kept = "traces.json, calibration.json and scores.safetensors"
        assert lines[3:] == [f"wrote {model_folder / 'accuracy.json'}, {kept}"]
        assert "\x1b" not in outcome.out + outcome.err

    def test_replayed_mean_is_that_of_generating(self, model_folder: Path, prompts: Path) -> None:
        outcome = accuracy(model_folder, prompts, "--format", "json", "--quiet")
        assert outcome.err == ""
        model = medusa_cli.load(str(model_folder), tree="mc_sim_7b_7", offline=True)
        lengths: list[int] = []
        for question in read_questions(str(prompts)):
            answers: list[str] = []
            for _ in range(1 + len(question.follow_ups)):
                result = model.generate(question.messages(answers), limits=Limits(12))
                answers.append(result.text)
                lengths += result.accept_lengths
        replayed = outcome.json["replay"]
        assert replayed["steps"] == len(lengths)
        assert replayed["mean_accept_length"] == pytest.approx(
            sum(lengths) / len(lengths), abs=1e-4
        )

    def test_json_is_the_file_and_the_replay(self, model_folder: Path, prompts: Path) -> None:
        out = model_folder.parent / "results"
        report = accuracy(model_folder, prompts, "--format", "json", "--out", str(out)).json
        file = json.loads((out / "accuracy.json").read_text())
        assert not (model_folder / "traces.json").exists()
        assert report.pop("replay")["tree"] == "mc_sim_7b_7"
        assert report == file
        assert file["format"] == "medusa-accuracy/1"
        overall, categories = file["overall"], file["categories"]
        assert list(categories) == ["short", "long"]
        for key in range(4):
            counts = [categories[name]["counts"][key] for name in categories]
            assert sum(counts) == overall["counts"][key]
            hits = sum(overall["hits"][key][:10])
            assert overall["top"][key][9] == pytest.approx(hits / overall["counts"][key], abs=1e-4)

    def test_limit_spreads_over_categories_and_the_digest_is_the_whole_sets(
        self, model_folder: Path, prompts: Path
    ) -> None:
        report = accuracy(model_folder, prompts, "--format", "json", "--limit", "2").json
        assert list(report["categories"]) == ["short", "long"]
        digest = prompts_digest(read_questions(str(prompts)))
        assert report["provenance"]["prompts_digest"] == digest

    def test_an_interrupt_prints_what_was_measured(
        self, model_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("medusa_cli.cli.accuracy.interruptible", interrupted_after(30))
        part = accuracy(model_folder, prompts)
        assert part.code == 130
        assert "PARTIAL" in part.out
        kept = (model_folder / "traces.json").read_text()
        assert not from_json(kept, "x").provenance.complete
        monkeypatch.undo()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert accuracy(model_folder, prompts).code == 0
        complete = (model_folder / "traces.json").read_text()
        assert complete != kept
        monkeypatch.setattr("medusa_cli.cli.accuracy.interruptible", interrupted_after(30))
        again = accuracy(model_folder, prompts)
        assert again.code == 130
        assert f"not saved: {model_folder} holds a complete measurement" in again.err
        assert (model_folder / "traces.json").read_text() == complete
        monkeypatch.setattr("medusa_cli.cli.accuracy.interruptible", interrupted_after(0))
        nothing = accuracy(model_folder, prompts)
        assert (nothing.code, nothing.out) == (130, "")
        assert "before the first answer" in nothing.err

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (("-n", "0"), 2, "--max-new-tokens must be at least 1"),
            (("--limit", "0"), 2, "--limit must be at least 1"),
            (("--prompts", "nope.jsonl"), 2, "cannot be read"),
            (("--device", "cpu", "--device-map", "auto"), 2, "drop --device"),
            (("--tree", "mc_sim_7b_7"), 2, "No such option"),
            (("--heads", "nope"), 3, "no heads 'nope'"),
            (("--prompts", "long.jsonl"), 4, "no prompt fits the model's context"),
            (("--out", "prompts.jsonl"), 1, "choose another with --out"),
        ],
    )
    def test_errors(
        self, model_folder: Path, prompts: Path, arguments: tuple[str, ...], code: int, said: str
    ) -> None:
        Path("long.jsonl").write_text(json.dumps({"prompt": "x" * CONTEXT}))
        outcome = accuracy(model_folder, prompts, *arguments)
        assert (outcome.code, outcome.out) == (code, "")
        assert said in outcome.err
        assert not (model_folder / "traces.json").exists()

    def test_a_tree_wider_than_traces_is_not_replayed(
        self, model_folder: Path, prompts: Path
    ) -> None:
        config = model_folder / "config.json"
        tree = {"tree": str(model_folder / "all.json")}
        config.write_text(json.dumps(json.loads(config.read_text()) | tree))
        outcome = accuracy(model_folder, prompts)
        assert outcome.code == 0
        assert "mean accept length" not in outcome.out


def interrupted_after(steps: int) -> Callable[[], AbstractContextManager[Callable[[], bool]]]:
    @contextmanager
    def block() -> Iterator[Callable[[], bool]]:
        calls = iter(range(10**6))
        yield lambda: next(calls) >= steps

    return block


class TestBuild:
    """`medusa tree build`."""

    @pytest.fixture
    def measured(self, model_folder: Path, prompts: Path) -> Path:
        assert accuracy(model_folder, prompts).code == 0
        return model_folder

    def test_builds_from_traces(self, measured: Path) -> None:
        outcome = build(measured, "--nodes", "9")
        assert (outcome.code, outcome.err) == (0, "")
        tree = load_tree("tiny_9_nodes.json")
        assert (tree.name, tree.nodes) == ("tiny_9_nodes", 9)
        traces = from_json((measured / "traces.json").read_text(), "x")
        digest = traces.provenance.prompts_digest
        assert f"traces of {traces.positions} positions of heads tiny" in tree.origin
        assert f"prompts {digest} (prompts.jsonl)" in tree.origin
        assert f"replayed mean {mean_accept_length(tree, traces):.2f} over" in outcome.out
        assert outcome.out.startswith("wrote tiny_9_nodes.json: 9 nodes, ")
        used = ("generate", "-m", str(measured), "-p", "Hi", "-n", "4", "--tree")
        assert medusa(*used, "tiny_9_nodes.json").code == 0

    def test_builds_from_accuracy(self, measured: Path) -> None:
        assert build(measured, "--nodes", "9", "--from", "accuracy", "--name", "mine").code == 0
        assert "rank accuracies of heads tiny" in load_tree("mine.json").origin
        (measured / "traces.json").unlink()
        outcome = build(measured, "--nodes", "9", "--out", "sub/other.json")
        assert outcome.code == 0
        assert "replayed" not in outcome.out
        other = load_tree("sub/other.json")
        assert other.name == "other"
        assert other.choices == load_tree("mine.json").choices

    def test_a_heads_config_counts_as_accuracy(self, model_folder: Path, tmp_path: Path) -> None:
        save_file(head_tensors(2), tmp_path / "medusa_heads.safetensors")
        rows = {"accuracy": {"rank_accuracy": [[0.5, 0.2], [0.3], [0.9]]}}
        (tmp_path / "config.json").write_text(json.dumps(rows))
        outcome = build(model_folder, "--heads", str(tmp_path), "--nodes", "4", "--name", "t")
        assert outcome.code == 0
        assert "expected accept length 1.85\n" in outcome.out
        tree = load_tree("t.json")
        assert tree.choices == ((0,), (1,), (0, 0))
        assert "config of heads" in tree.origin

    def test_an_existing_file_is_kept_without_force(self, measured: Path) -> None:
        Path("mine.json").write_text("mine")
        outcome = build(measured, "--nodes", "9", "--name", "mine")
        assert outcome.code == 2
        assert "--force" in outcome.err
        assert Path("mine.json").read_text() == "mine"
        assert build(measured, "--nodes", "9", "--name", "mine", "--force").code == 0
        assert load_tree("mine.json").nodes == 9

    def test_traces_of_other_heads_do_not_count(self, measured: Path) -> None:
        changed = {name: tensor + 1 for name, tensor in head_tensors(4).items()}
        save_file(changed, measured / "medusa_lm_head.safetensors")
        outcome = build(measured, "--nodes", "9")
        assert outcome.code == 3
        first, *_, last = outcome.err.splitlines()
        assert "measured with other heads" in first
        assert last.endswith("measure them with `medusa accuracy`")

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            ((), 2, "Missing option '--nodes'"),
            (("--nodes", "1"), 2, "greater than or equal to 2"),
            (("--nodes", "9"), 3, "measure them with `medusa accuracy`"),
            (("--nodes", "9", "--from", "traces"), 3, "no traces of heads tiny"),
            (("--nodes", "9", "--from", "guess"), 2, "guess"),
        ],
    )
    def test_errors(
        self, model_folder: Path, arguments: tuple[str, ...], code: int, said: str
    ) -> None:
        outcome = build(model_folder, *arguments)
        assert (outcome.code, outcome.out) == (code, "")
        assert said in outcome.err
        assert len(outcome.err.splitlines()) <= 2


class TestShow:
    """`medusa tree show`."""

    def test_drawing(self) -> None:
        choices = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 4], [2, 1], [0, 1, 0], [0, 1, 2]]
        assert list(tree_lines(static_tree("t", choices), 80)) == [
            "root",
            "├─ 0",
            "│  ├─ 0",
            "│  ├─ 1 ─ 0 2",
            "│  └─ 4",
            "├─ 1",
            "├─ 2 ─ 1",
            "└─ 3",
        ]
        assert list(tree_lines(ROOT_ONLY, 80)) == ["root"]

    def test_long_rows_are_wrapped_and_every_node_is_there(self) -> None:
        tree = dense_tree("wide", [3, 40])
        lines = list(tree_lines(tree, 50))
        assert max(map(len, lines)) <= 50
        ranks = [word for line in lines for word in line.split() if word.isdigit()]
        assert len(ranks) == len(tree.choices)

    @pytest.mark.parametrize("name", ["mc_sim_7b_63", "zephyr_stage2"])
    def test_64_nodes_fit_a_terminal(self, name: str) -> None:
        outcome = medusa("tree", "show", name)
        assert outcome.code == 0
        lines = outcome.out.splitlines()
        assert lines[0] == f"{name}: 64 nodes, 4 deep"
        assert len(lines) < 50
        assert max(map(len, lines)) <= 80
        drawn = lines[lines.index("root") :]
        ranks = [word for line in drawn for word in line.split() if word.isdigit()]
        assert len(ranks) == 63

    def test_plot_has_a_place_of_its_own_for_every_node(self) -> None:
        for name in shipped_trees():
            tree = load_tree(name)
            rows = node_rows(tree)
            assert rows.keys() == {(), *tree.choices}
            assert len({(len(choice), row) for choice, row in rows.items()}) == tree.nodes
            for depth in range(1, tree.depth + 1):
                level = sorted(row for choice, row in rows.items() if len(choice) == depth)
                assert all(b - a >= 1 for a, b in zip(level, level[1:], strict=False))

    def test_labels_do_not_overlap(self) -> None:
        tree = load_tree("mc_sim_7b_63")
        figure = tree_figure(tree)
        figure.draw_without_rendering()
        boxes = [text.get_bbox_patch().get_window_extent() for text in figure.axes[0].texts]
        assert len(boxes) == tree.nodes
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[i + 1 :])

    def test_plot_files(self, tmp_path: Path) -> None:
        outcome = medusa("tree", "show", "mc_sim_7b_7", "--plot", "t.png")
        assert (outcome.code, outcome.err) == (0, "wrote t.png\n")
        assert Path("t.png").read_bytes().startswith(b"\x89PNG")
        save_plot(static_tree("costs $5 and $6", [[0]]), tmp_path / "t.svg")
        assert "<svg" in (tmp_path / "t.svg").read_text()

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (("nope",), 3, "no tree 'nope'"),
            (("mc_sim_7b_7", "--plot", "t.gif"), 2, ".png or .svg"),
            (("mc_sim_7b_7", "--plot", "no/such/t.png"), 1, "cannot be written"),
            ((), 2, "Missing argument"),
        ],
    )
    def test_errors(self, arguments: tuple[str, ...], code: int, said: str) -> None:
        outcome = medusa("tree", "show", *arguments)
        assert outcome.code == code
        assert said in outcome.err


def test_list_and_help() -> None:
    rows = json.loads(medusa("tree", "list", "--format", "json").out)
    assert [row["name"] for row in rows] == list(shipped_trees())
    wide = next(row for row in rows if row["name"] == "mc_sim_7b_63")
    assert (wide["nodes"], wide["depth"]) == (64, 4)
    table = medusa("tree", "list").out
    assert max(map(len, table.splitlines())) <= 80
    for row in rows:
        assert f"{row['name']}: {row['nodes']} nodes, {row['depth']} deep\n" in table
        assert row["origin"] in " ".join(table.split())
    assert medusa("tree").out == medusa("tree", "--help").out
    assert "accept length" in " ".join(medusa("accuracy", "--help").out.split())
