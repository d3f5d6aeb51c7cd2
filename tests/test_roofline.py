"""Counts against hand counts, roof arithmetic, and measuring by a clock that the test drives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from conftest import HIDDEN, VOCAB, make_head, tiny_base, tiny_module
from medusa_cli.bench import counts
from medusa_cli.bench.counts import AttentionShape, Work
from medusa_cli.bench.roofline import Effort, measure_roofline
from medusa_cli.bench.roofline_cases import (
    Case,
    Noise,
    attention_cases,
    head_cases,
    linear_cases,
    product_cases,
)
from medusa_cli.bench.roofline_plot import plot_roofline
from medusa_cli.bench.roofline_report import Limit, Part, Point, Roof, Roofline, tables, to_data
from medusa_cli.decoding.tree import ROOT_ONLY, dense_tree
from medusa_cli.models.base import BaseModel, Engine
from medusa_cli.models.heads import HeadKind, Heads, HeadsInfo
from medusa_cli.session import Medusa

TICK = 2.0**-10
BUFFER = 1 << 20
EFFORT = Effort(
    buffer_bytes=BUFFER, memory=700_000, seconds=float("inf"), repeats=2, matrix_sizes=(8, 16)
)
SHAPE = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=8)
DRAFT_VOCABULARY = 100


class FakeClock:
    """Time that passes by a tick with each look at it, and when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now


def make_heads(base: BaseModel, kind: str) -> Heads:
    """Two heads of one residual layer each."""
    conditioned = kind == "conditioned"
    own = VOCAB if kind == "own LM head" else None
    modules = nn.ModuleList(make_head(conditioned=conditioned, rows=own) for _ in range(2))
    shared, ids = base.lm_head, None
    if kind == "draft vocabulary":
        shared = nn.Linear(HIDDEN, DRAFT_VOCABULARY, bias=False)
        ids = torch.arange(DRAFT_VOCABULARY)
    info = HeadsInfo(
        name=kind,
        kind=HeadKind.CONDITIONED if conditioned else HeadKind.MEDUSA,
        num_heads=2,
        num_layers=1,
        vocabulary=VOCAB if ids is None else DRAFT_VOCABULARY,
    )
    return Heads(info, modules, base.embedding, shared, ids)


def make_medusa(base: BaseModel, heads: Heads | None = None) -> Medusa:
    """Without a tokenizer: the roofline reads no text."""
    tree = ROOT_ONLY if heads is None else dense_tree("dense", [2, 2])
    tokenizer: Any = None
    return Medusa("tiny", base, tokenizer, heads, tree)


def measured(
    medusa: Medusa, clock: Callable[[], float] | None = None, effort: Effort = EFFORT
) -> Roofline:
    """A roofline of a tiny model at a few sizes."""
    return measure_roofline(
        medusa, [1, 2, 4], [8, 16], [1, 3], [].append, clock or FakeClock(), effort
    )


@pytest.fixture(scope="module")
def roofline() -> Roofline:
    """A tiny Llama with conditioned heads, by the fake clock."""
    base = tiny_base()
    return measured(make_medusa(base, make_heads(base, "conditioned")))


@pytest.fixture
def noise() -> Noise:
    """Noise with a small buffer."""
    return Noise(torch.Generator().manual_seed(0), torch.randn(1 << 16))


# Counts.


def test_linear_layers_of_a_llama_with_two_kv_heads() -> None:
    # A layer: q, o 32x32; k, v 32x16; gate, up 32x48; down 48x32: 7,680 weights. LM head: 8,320.
    weights = 2 * 7680 + 8320
    # Inputs of a row: 6 x 32 + 48; outputs: 3 x 32 + 2 x 16 + 2 x 48; LM head: 32 + 260.
    activations = 2 * (240 + 224) + 292
    work = counts.linear_work(tiny_base("llama"), rows=3)
    assert work == Work(2 * 3 * weights, 4 * (weights + 3 * activations))
    assert work == Work(142_080, 109_360)


def test_linear_layers_of_gpt_neox_with_biases() -> None:
    # A layer: 32x96, 32x32, 32x48, 48x32 and 208 biases; LM head: 8,320, no bias.
    weights, biases = 2 * 7168 + 8320, 2 * 208
    activations = 2 * (144 + 208) + 292
    work = counts.linear_work(tiny_base("gpt_neox"), rows=1)
    assert work == Work(2 * weights, 4 * (weights + biases + activations))
    assert work == Work(45_312, 96_272)


def test_conv1d_is_linear_and_a_tied_lm_head_counts_but_its_embedding_does_not() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    base = BaseModel(GPT2LMHeadModel(config).eval())
    assert base.lm_head.weight is base.embedding.weight
    assert counts.linear_work(base, rows=1).flops == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128 + 8320)


def test_half_precision_halves_the_bytes_and_keeps_the_flops() -> None:
    full = counts.linear_work(tiny_base(), rows=5)
    half = counts.linear_work(BaseModel(tiny_module().to(torch.bfloat16)), rows=5)
    assert half == Work(full.flops, full.bytes // 2)


def test_a_layer_used_in_two_places_counts_twice() -> None:
    layer = nn.Linear(4, 4)
    assert len(counts.linear_layers(nn.ModuleList([layer, layer]))) == 2


def test_fused_experts_are_left_out_with_a_warning() -> None:
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    (warning,) = counts.uncounted_weights(BaseModel(MixtralForCausalLM(config).eval()))
    assert "experts" in warning
    assert "left out" in warning


def test_all_weights_of_dense_models_are_counted(base: BaseModel) -> None:
    assert counts.uncounted_weights(base) == ()


def test_attention_reads_keys_once_per_kv_head_and_a_mask_per_sequence() -> None:
    # 13 columns. Keys, values 2 x 2 x 13 x 8; queries, output 2 x 4 x 3 x 8; mask 3 x 13.
    work = counts.attention_work(SHAPE, context=10, nodes=3, batch=2, itemsize=4)
    assert work.flops == 2 * 2 * (2 * 4 * 3 * 13 * 8 * 2)
    assert work.bytes == 2 * 2 * 4 * (416 + 192 + 39)


def test_a_lone_root_has_no_mask() -> None:
    work = counts.attention_work(SHAPE, context=10, nodes=1, batch=1, itemsize=2)
    assert work.bytes == 2 * 2 * (2 * 2 * 11 * 8 + 2 * 4 * 8)


def test_the_product_writes_its_scores_and_reads_them_back() -> None:
    work = counts.product_work(SHAPE, context=10, nodes=3, batch=2, itemsize=4)
    assert work == Work(2 * 4992, 2 * 4 * (416 + 192 + 2 * 4 * 3 * 13))


def test_attention_shape_comes_from_the_config() -> None:
    assert counts.attention_shape(tiny_base("llama")) == SHAPE
    assert counts.attention_shape(tiny_base("gpt_neox")) == AttentionShape(2, 4, 4, 8)


def test_a_head_may_be_wider_than_hidden_size_over_heads() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
    )
    base = BaseModel(LlamaForCausalLM(config).eval())
    assert counts.attention_shape(base) == AttentionShape(3, 4, 1, 16)


def test_falcon_says_one_kv_head_in_its_own_way() -> None:
    config = FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    assert counts.attention_shape(BaseModel(FalconForCausalLM(config))).kv_heads == 1


@pytest.mark.parametrize(
    ("kind", "batch", "flops", "elements"),
    [
        # Two heads, each with 32x32 + 32 and an LM head of 32x260.
        ("own LM head", 1, 2 * 2 * (1024 + 8320), 2 * (1056 + 64 + 8320 + 292)),
        # The LM head is read once, for two rows.
        ("shared LM head", 1, 2 * 2 * (1024 + 8320), 2 * (1056 + 64) + 8320 + 2 * 292),
        # An input layer of 64x32 + 32, three sequences: six rows for the LM head.
        (
            "conditioned",
            3,
            2 * 2 * 3 * (2048 + 1024 + 8320),
            2 * (2080 + 3 * 96 + 1056 + 3 * 64) + 8320 + 6 * 292,
        ),
        # 100 of 260 tokens.
        ("draft vocabulary", 1, 2 * 2 * (1024 + 3200), 2 * (1056 + 64) + 3200 + 2 * 132),
    ],
)
def test_heads_run_on_one_row_per_sequence(
    kind: str, batch: int, flops: int, elements: int
) -> None:
    base = tiny_base()
    work = counts.heads_work(base, make_heads(base, kind), used=2, batch=batch)
    assert work == Work(flops, 4 * elements)


def test_only_the_heads_used_are_counted() -> None:
    base = tiny_base()
    heads = make_heads(base, "own LM head")
    assert counts.heads_work(base, heads, 1, 1) * 2 == counts.heads_work(base, heads, 2, 1)


# What is run is what is counted.


def _flops(case: Case) -> int:
    """What torch counts; of the attention kernels it knows the unfused one on every device."""
    run, counter = case.prepare(), FlopCounterMode(display=False)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter.get_total_flops()


def test_the_linear_layers_run_are_those_counted(noise: Noise, base: BaseModel) -> None:
    for case in linear_cases(noise, base, [1, 5], [1, 2]):
        assert _flops(case) == case.work.flops


def test_the_attention_run_is_that_counted(noise: Noise) -> None:
    for case in attention_cases(noise, SHAPE, Engine(), [1, 5], [7], [1, 2]):
        assert _flops(case) == case.work.flops


def test_the_product_run_is_that_counted(noise: Noise) -> None:
    for case in product_cases(noise, SHAPE, 7, [1, 5], [1, 2]):
        assert _flops(case) == case.work.flops


@pytest.mark.parametrize(
    "kind", ["own LM head", "shared LM head", "conditioned", "draft vocabulary"]
)
def test_the_heads_run_are_those_counted(noise: Noise, kind: str) -> None:
    base = tiny_base()
    for case in head_cases(noise, base, make_heads(base, kind), 2, [1, 3]):
        assert _flops(case) == case.work.flops


def test_noise_that_does_not_fit_the_buffer_is_made(noise: Noise) -> None:
    assert [slot.shape for slot in noise.slots(3, 1 << 17)] == [(1 << 17,)]
    assert len(noise.slots(3, 1 << 15)) == 2


# Roof arithmetic.


def test_a_roof_rises_to_its_ridge_and_is_flat_behind_it() -> None:
    roof = Roof(bandwidth=10.0, flops=40.0)
    assert roof.ridge == 4.0
    assert [roof.attainable(x) for x in (1.0, 4.0, 100.0)] == [10.0, 40.0, 40.0]


def test_memory_limits_below_the_ridge_and_arithmetic_from_it_on() -> None:
    roof = Roof(bandwidth=10.0, flops=40.0)
    assert [roof.limit(x) for x in (3.9, 4.0)] == [Limit.MEMORY, Limit.COMPUTE]


def test_a_point_knows_its_rate_and_its_share_of_the_roof() -> None:
    point = Point(Part.LINEARS, 1, None, 1, Work(20, 10), 4.0, Roof(bandwidth=10.0, flops=40.0))
    assert (point.work.intensity, point.achieved, point.limit) == (2.0, 5.0, Limit.MEMORY)
    assert point.share == 0.25


# Measuring.


def test_the_roof_follows_from_the_clock(roofline: Roofline) -> None:
    assert roofline.roof == Roof(bandwidth=BUFFER / TICK, flops=2 * 16**3 / TICK)


def test_every_part_is_measured_at_every_size(roofline: Roofline) -> None:
    sizes = {
        part: [(p.nodes, p.context, p.batch) for p in roofline.points if p.part is part]
        for part in Part
    }
    assert sizes[Part.LINEARS] == [(n, None, b) for b in (1, 3) for n in (1, 2, 4)]
    assert sizes[Part.ATTENTION] == [(n, c, b) for b in (1, 3) for c in (8, 16) for n in (1, 2, 4)]
    assert sizes[Part.HEADS] == [(None, None, 1), (None, None, 3)]
    assert {p.part for p in roofline.attention_product} == {Part.PRODUCT}
    assert all(p.seconds == TICK for p in roofline.points + roofline.attention_product)


def test_achieved_flops_are_counted_work_over_measured_time(roofline: Roofline) -> None:
    point = next(
        p for p in roofline.points if (p.part, p.nodes, p.batch) == ("linear layers", 1, 3)
    )
    assert point.achieved == 142_080 / TICK


def test_one_node_is_always_among_the_nodes() -> None:
    found = measure_roofline(
        make_medusa(tiny_base()), [4], [8], [1], [].append, FakeClock(), EFFORT
    )
    assert [p.nodes for p in found.points if p.part is Part.LINEARS] == [1, 4]


def test_a_plain_model_has_no_heads_part() -> None:
    found = measured(make_medusa(tiny_base()))
    assert {p.part for p in found.points} == {Part.LINEARS, Part.ATTENTION}
    assert "Medusa heads" not in [table.title for table in tables(found)]


def test_sizes_beyond_the_memory_bound_are_skipped_with_a_warning(roofline: Roofline) -> None:
    assert 0 < len(roofline.attention_product) < 32
    assert all(p.work.bytes <= EFFORT.memory for p in roofline.attention_product)
    left_out = 32 - len(roofline.attention_product)
    assert any(f"attention matrix product: {left_out} of 32" in w for w in roofline.warnings)


def test_sizes_beyond_the_time_bound_are_skipped_with_a_warning() -> None:
    # By this clock's roof, 8,192 FLOPs a tick, the linear layers take 6 ticks a row.
    found = measured(make_medusa(tiny_base()), effort=Effort(BUFFER, 1 << 20, 10 * TICK, 1, (16,)))
    linears = [p for p in found.points if p.part is Part.LINEARS]
    assert [(p.nodes, p.batch) for p in linears] == [(1, 1)]
    assert any(w.startswith("linear layers: 5 of 6 sizes") for w in found.warnings)


def test_a_context_beyond_the_models_is_left_out_with_a_warning() -> None:
    found = measure_roofline(
        make_medusa(tiny_base()), [1], [8, 4096], [1], [].append, FakeClock(), EFFORT
    )
    assert {p.context for p in found.points} == {None, 8}
    assert any("4096" in w for w in found.warnings)


def test_progress_names_each_stage() -> None:
    heard: list[str] = []
    base = tiny_base()
    medusa = make_medusa(base, make_heads(base, "shared LM head"))
    measure_roofline(medusa, [1], [8], [1], heard.append, FakeClock(), EFFORT)
    stages = ("memory", "linear", "attention: ", "Medusa", "attention matrix", "memory")
    assert len(heard) == len(stages)
    assert all(map(str.startswith, heard, stages))


def test_free_nodes_by_count_lie_where_the_intensity_meets_the_ridge(roofline: Roofline) -> None:
    base = tiny_base()
    effort = Effort(1 << 18, 1 << 20, float("inf"), 1, (64,))  # ridge 2: above one row's 0.5
    ridge = 2 * 64**3 / (1 << 18)
    for free in measured(make_medusa(base), effort=effort).free:
        assert free.counted is not None
        rows = free.batch * free.counted
        assert counts.linear_work(base, rows).intensity <= ridge
        assert counts.linear_work(base, rows + free.batch).intensity > ridge
    # One row is already beyond a ridge of 1 / 128.
    assert [free.counted for free in roofline.free] == [0, 0]


def test_a_ridge_above_every_intensity_leaves_all_nodes_free() -> None:
    effort = Effort(1 << 18, 1 << 20, float("inf"), 1, (256,))  # ridge 128
    assert measured(make_medusa(tiny_base()), effort=effort).free[0].counted is None


def test_free_nodes_as_measured_cost_at_most_a_quarter_more_than_one() -> None:
    base, clock = tiny_base(), FakeClock()
    cost = {1: 0.1, 2: 0.12, 4: 0.14, 3: 0.1, 6: 0.2, 12: 0.12}

    def spend(_module: nn.Module, arguments: tuple[torch.Tensor, ...], _output: Any) -> None:
        clock.now += cost[arguments[0].shape[0]]

    base.lm_head.register_forward_hook(spend)
    first, second = measured(make_medusa(base), clock).free
    assert (first.batch, first.measured) == (1, 2)
    # The largest that is cheap enough, also behind one that is not.
    assert (second.batch, second.measured) == (3, 4)


# Reports.


def test_tables_have_a_cell_for_each_column(roofline: Roofline) -> None:
    found = tables(roofline)
    assert [table.title for table in found] == [
        "Roof",
        "Linear layers",
        "Attention",
        "Medusa heads",
        "Attention matrix product, context 1024",
    ]
    for table in found:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_linear_table_says_what_limits_and_what_is_free(roofline: Roofline) -> None:
    table = tables(roofline)[1]
    assert dict(zip(table.columns, table.rows[3], strict=True)) == {
        "batch": "3",
        "nodes": "1",
        "GFLOP": "0.000",
        "MB": "0.1",
        "FLOP/byte": "1.3",
        "ms": "0.98",
        "GFLOP/s": "0.1",
        "% of roof": "1734",
        "limited by": "compute",
    }
    assert "batch 3: verification is free up to about 0 nodes" in table.notes[1]
    assert "up to 4 as measured" in table.notes[1]


def test_what_the_grid_lacks_is_marked(roofline: Roofline) -> None:
    # Batch 4 fits the memory bound with one node alone.
    table = tables(roofline)[-1]
    assert table.columns[2:4] == ("batch 1, GFLOP/s", "batch 4, GFLOP/s")
    assert "–" not in table.rows[0]
    assert [row[3] for row in table.rows[1:]] == ["–"] * (len(table.rows) - 1)
    assert "–" not in {row[2] for row in table.rows}


def test_data_survives_json(roofline: Roofline) -> None:
    data = to_data(roofline)
    assert json.loads(json.dumps(data)) == data
    assert data["bandwidth_bytes_per_second"] == BUFFER / TICK
    assert len(data["points"]) == len(roofline.points)
    assert data["points"][0]["limit"] == "compute"


def test_the_plot_is_a_png_or_an_svg_by_suffix(roofline: Roofline, tmp_path: Path) -> None:
    plot_roofline(roofline, tmp_path / "roof.png")
    plot_roofline(roofline, tmp_path / "roof.svg")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    drawing = (tmp_path / "roof.svg").read_text()
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    for text in ("linear layers, batch 3", "attention, context 16, batch 1", "FLOP/byte"):
        assert text in drawing


def test_a_plain_models_plot_needs_no_product(roofline: Roofline, tmp_path: Path) -> None:
    bare = Roofline("cpu", "float32", roofline.roof, roofline.points[:1], (), (), ())
    plot_roofline(bare, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").stat().st_size > 0


def test_an_interrupt_leaves_the_points_measured_so_far() -> None:
    asked = iter([False] * 3)
    found = measure_roofline(
        make_medusa(tiny_base()), [1, 2, 4], [8], [1], [].append, FakeClock(), EFFORT,
        should_stop=lambda: next(asked, True),
    )  # fmt: skip
    assert len(found.points) == 3
    assert not found.complete
    assert found.warnings[0].startswith("partial")
    assert measured(make_medusa(tiny_base())).complete
