"""The CPU engine: kernels against numpy, rows that do not depend on their neighbours, exactness."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from typer.testing import CliRunner

import medusa_cli
from conftest import ARCHITECTURES, CONTEXT, HIDDEN, VOCAB, tiny_module
from medusa_cli.cli.app import app
from medusa_cli.decoding.tree import Tree, dense_tree, static_tree
from medusa_cli.decoding.tree_buffers import tree_buffers
from medusa_cli.errors import UsageError
from medusa_cli.models import base as base_module
from medusa_cli.models.base import BaseModel
from medusa_cli.models.cache import KVCache
from medusa_cli.models.cpu import attention, jobs, matmul
from medusa_cli.models.cpu.engine import accelerate
from medusa_cli.models.cpu.modules import (
    FloatLinear,
    FusedAttention,
    FusedMLP,
    Int8Linear,
    PackedEmbedding,
    PackedLinear,
    RMSNorm,
)
from medusa_cli.models.cpu.pool import Pool
from medusa_cli.models.cpu.tiles import int8_tile
from medusa_cli.models.loader import LoadOptions

CPU = torch.device("cpu")
THREADS = 2
POOL = Pool(THREADS, jobs.helper)
TREE = static_tree("t", [[0], [1], [2], [0, 0], [1, 0], [1, 1], [0, 0, 0], [1, 1, 0]])
LINEARS = [FloatLinear, Int8Linear]


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=HIDDEN, n_layer=2, n_head=4)
    )


def qwen3() -> PreTrainedModel:
    """Norms on queries and keys, heads wider than hidden size over heads, a tied LM head."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            max_position_embeddings=CONTEXT,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
    )


MODELS = ARCHITECTURES | {"gpt2": gpt2, "qwen3": qwen3}


def module(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def on_engine(name: str, *, int8: bool) -> BaseModel:
    return accelerate(module(name), int8=int8, threads=THREADS)


def ids(count: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Matrix products


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(16, 16), (33, 51), (100, 7), (1, 1)])
def test_a_packed_layer_computes_what_it_replaces(sizes: tuple[int, int], bias: bool) -> None:
    weight, offset = random(*sizes), random(sizes[0], seed=1) if bias else None
    layer = FloatLinear(weight, offset, POOL)
    for rows in range(1, 14):
        x = random(rows, sizes[1], seed=rows)
        expected = nn.functional.linear(x, weight, offset)
        torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer(x[None])[0], layer(x), atol=0, rtol=0)


@pytest.mark.parametrize("sizes", [(16, 16), (33, 51), (100, 7), (1, 1)])
def test_int8_is_the_product_of_the_rounded_weights(sizes: tuple[int, int]) -> None:
    weight, bias = random(*sizes), random(sizes[0], seed=1)
    layer = Int8Linear(weight, bias, POOL)
    rounded = layer.weight_rows(torch.arange(sizes[0]))
    scale = weight.abs().amax(dim=1, keepdim=True)
    assert ((rounded - weight).abs() <= scale / 127 * 0.501).all()
    for rows in range(1, 14):
        x = random(rows, sizes[1], seed=rows)
        expected = nn.functional.linear(x, rounded, bias)
        # 16-bit activations: what is left is a thousandth of the largest one.
        bound = 1e-3 * x.abs().amax() * rounded.abs().sum(dim=1)
        assert ((layer(x) - expected).abs() <= bound + 1e-5).all()


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("inputs", [15, 64])
def test_a_row_is_bit_identical_alone_and_beside_others(
    kind: type[PackedLinear], inputs: int
) -> None:
    layer = kind(random(50, inputs), random(50, seed=1), POOL)
    x = random(17, inputs, seed=2) * torch.logspace(-3, 3, 17)[:, None]
    alone = torch.cat([layer(x[i : i + 1]) for i in range(17)])
    for first in range(17):
        for last in range(first + 1, 18):
            assert torch.equal(layer(x[first:last]), alone[first:last])


def test_sums_of_the_largest_numbers_do_not_overflow() -> None:
    inputs = 1500
    layer = Int8Linear(torch.ones(3, inputs), None, POOL)
    torch.testing.assert_close(layer(torch.ones(1, inputs)), torch.full((1, 3), float(inputs)))
    assert matmul.activation_limit(inputs) * 127 * inputs < 2**31


def test_rows_of_zeros_give_the_bias() -> None:
    layer = Int8Linear(random(20, 8), random(20, seed=1), POOL)
    assert torch.equal(layer(torch.zeros(2, 8)), random(20, seed=1).expand(2, 20))


def test_the_portable_tile_computes_what_that_of_avx2_does() -> None:
    tile = int8_tile(1, portable=True)

    @njit
    def run(x, row_scales, w, scales, bias, out):  # type: ignore[no-untyped-def]
        steps = w.shape[1]
        for t in range(w.shape[0] // 2):
            tile(
                x.ctypes.data, 0, w.ctypes.data + t * 32 * steps, 16 * steps, 64, steps,
                scales.ctypes.data + 64 * t, row_scales.ctypes.data, bias.ctypes.data + 64 * t,
                out.ctypes.data + 64 * t, 0,
            )  # fmt: skip

    weight, x = random(32, 40), random(1, 40, seed=1)
    layer = Int8Linear(weight, None, POOL)
    panels, scales = matmul.pack_int8(weight.numpy())
    whole, row_scales = np.zeros((1, 40), np.int16), np.empty(1, np.float32)
    matmul.quantize_rows(x.numpy(), matmul.activation_limit(40), whole, row_scales)
    out = np.empty((1, 32), np.float32)
    run(whole, row_scales, panels, scales, np.zeros(32, np.float32), out)
    assert torch.equal(torch.from_numpy(out), layer(x))


@pytest.mark.parametrize("kind", LINEARS)
def test_rows_of_a_weight_pack_to_the_same_numbers(kind: type[PackedLinear]) -> None:
    """A draft vocabulary is made of rows of a packed LM head: they must not be rounded twice."""
    layer, rows = kind(random(40, 24), None, POOL), torch.tensor([3, 39, 17])
    x = random(2, 24, seed=1)
    again = kind(layer.weight_rows(rows), None, POOL)
    assert torch.equal(again(x), layer(x)[:, rows])


# Attention


def attend(
    queries: Tensor,  # [N, H, D]
    keys: Tensor,  # [H_kv, L + N, D]
    values: Tensor,
    seen: list[list[int]],
    *,
    tree_rows: int,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Runs the kernel: the last `tree_rows` rows are seen along paths, those before as a block."""
    heads, rows, dim = keys.shape
    padded = -(-dim // matmul.TILE) * matmul.TILE
    panels = np.zeros((heads, 32, dim, 8), np.float32)
    stored = np.zeros((heads, padded // matmul.TILE, 256, matmul.TILE), np.float32)
    attention.store_rows(panels, stored, keys.numpy(), values.numpy(), 0)
    context = rows - tree_rows
    paths = [[row for row in line if row >= context] for line in seen]
    deepest = max(map(len, paths))
    table = np.array(
        [[context, len(path), *path, *[0] * (deepest - len(path))] for path in paths], np.int64
    )
    if tree_rows == 0:
        table = np.zeros((0, 0), np.int64)
    out = torch.empty(queries.shape)
    POOL.reserve(attention.scratch_elements(len(queries), 256, padded))
    jobs.attend(
        POOL.ready(), THREADS, POOL.scratch, queries.numpy(), panels, stored.ctypes.data,
        stored.strides[0], padded, rows, table, window or 0,
        np.float32(dim**-0.5), np.float32(softcap), out.numpy(),
    )  # fmt: skip
    return out


def expected_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: list[list[int]],
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    group = queries.shape[1] // keys.shape[0]
    rows = []
    for query, line in zip(queries.double(), seen, strict=True):
        kept = line if window is None else line[-window:]
        k = keys.double()[:, kept].repeat_interleave(group, 0)  # [H, J, D]
        v = values.double()[:, kept].repeat_interleave(group, 0)
        scores = torch.einsum("hd,hjd->hj", query, k) * queries.shape[2] ** -0.5
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        rows.append(torch.einsum("hj,hjd->hd", scores.softmax(-1), v))
    return torch.stack(rows).float()


def tree_lines(tree: Tree, context: int) -> list[list[int]]:
    buffers = tree_buffers(tree, CPU)
    return [
        [*range(context), *(context + buffers.ancestors[n].nonzero()[:, 0]).tolist()]
        for n in range(buffers.nodes)
    ]


@pytest.mark.parametrize("dim", [8, 12, 64])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize(("context", "window"), [(1, None), (70, None), (70, 9), (70, 2)])
def test_nodes_see_the_context_and_their_path(
    dim: int, heads: tuple[int, int], context: int, window: int | None
) -> None:
    lines = tree_lines(TREE, context)
    rows = context + TREE.nodes
    queries = random(TREE.nodes, heads[0], dim)
    keys, values = random(heads[1], rows, dim, seed=1), random(heads[1], rows, dim, seed=2)
    for softcap in (0.0, 2.0):
        found = attend(
            queries, keys, values, lines, tree_rows=TREE.nodes, window=window, softcap=softcap
        )
        expected = expected_attention(queries, keys, values, lines, window, softcap)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 9])
def test_a_node_is_bit_identical_to_a_lone_row_at_its_position(window: int | None) -> None:
    for context in (1, 15, 64, 90):
        lines, rows = tree_lines(TREE, context), context + TREE.nodes
        queries = random(TREE.nodes, 6, 16)
        keys, values = random(2, rows, 16, seed=1) * 3, random(2, rows, 16, seed=2)
        together = attend(queries, keys, values, lines, tree_rows=TREE.nodes, window=window)
        for node, line in enumerate(lines):
            alone = attend(
                queries[node : node + 1], keys[:, line].contiguous(),
                values[:, line].contiguous(), [list(range(len(line)))], tree_rows=0, window=window,
            )  # fmt: skip
            assert torch.equal(alone[0], together[node])


def test_a_prompt_is_causal_whatever_the_rows_at_once() -> None:
    count = 45
    queries = random(count, 4, 16)
    keys, values = random(2, count, 16, seed=1), random(2, count, 16, seed=2)
    lines = [list(range(i + 1)) for i in range(count)]
    whole = attend(queries, keys, values, lines, tree_rows=0)
    torch.testing.assert_close(
        whole, expected_attention(queries, keys, values, lines), atol=2e-6, rtol=1e-4
    )
    for i in (0, 7, 44):
        alone = attend(
            queries[i : i + 1], keys[:, : i + 1].contiguous(), values[:, : i + 1].contiguous(),
            lines[i : i + 1], tree_rows=0,
        )  # fmt: skip
        assert torch.equal(alone[0], whole[i])


# Whole models


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_engine_computes_the_stock_models_logits(name: str) -> None:
    stock, fast = BaseModel(module(name)), on_engine(name, int8=False)
    assert fast.engine.paths
    prompt, tree = ids(40), tree_buffers(TREE, CPU)
    for base in (stock, fast):
        base.cache = KVCache()  # type: ignore[attr-defined]
    outputs = [
        (base.prefill(prompt, base.cache), base.verify(ids(tree.nodes, 2), tree.depths, tree.paths, base.cache))  # noqa: E501
        for base in (stock, fast)
    ]  # fmt: skip
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(one.hidden, other.hidden, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_tree_logits_are_bit_identical_to_plain_ones(name: str, int8: bool) -> None:
    base = on_engine(name, int8=int8)
    prompt, tree = ids(40), tree_buffers(TREE, CPU)
    tokens = ids(tree.nodes, 2)
    cache = KVCache()
    base.prefill(prompt, cache)
    together = base.verify(tokens, tree.depths, tree.paths, cache).logits
    root = tree_buffers(dense_tree("r", [1]).limited(0), CPU)
    for node in range(tree.nodes):
        cache = KVCache()
        base.prefill(prompt, cache)
        for token in tokens[tree.ancestors[node]]:
            alone = base.verify(token[None], root.depths, root.paths, cache).logits
        assert torch.equal(alone[0], together[node])


def test_what_is_replaced() -> None:
    base = on_engine("qwen3", int8=False)
    kinds = [type(child) for child in base.module.modules()]
    assert kinds.count(FusedAttention) == kinds.count(FusedMLP) == 2
    assert kinds.count(RMSNorm) == 9
    assert kinds.count(PackedEmbedding) == 1
    assert not any(issubclass(kind, nn.Linear | nn.Embedding) for kind in kinds)


def test_a_tied_embedding_has_its_own_rows() -> None:
    stock, fast = module("qwen3"), on_engine("qwen3", int8=False)
    wanted = torch.arange(VOCAB)[None]
    assert torch.equal(fast.embedding(wanted), stock.get_input_embeddings()(wanted))


def test_int8_holds_no_float_copy() -> None:
    stock, fast = BaseModel(module("qwen3")), on_engine("qwen3", int8=True)
    assert fast.parameter_bytes() < 0.35 * stock.parameter_bytes()
    assert all(tensor.dim() < 2 for tensor in fast.module.parameters())


class _OtherNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class _OtherAttention(LlamaAttention):
    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


def test_what_computes_something_else_stays_stock() -> None:
    stock = tiny_module()
    for layer in stock.model.layers:
        layer.self_attn.__class__ = _OtherAttention
        layer.input_layernorm.__class__ = _OtherNorm
    expected = stock(ids(30)[None]).logits
    fast = accelerate(stock, int8=False, threads=THREADS)
    kinds = [type(child) for child in fast.module.modules()]
    assert kinds.count(_OtherAttention) == kinds.count(_OtherNorm) == 2
    assert kinds.count(FusedAttention) == 0
    assert kinds.count(RMSNorm) == 3
    torch.testing.assert_close(
        fast.extend(ids(30), KVCache()).logits, expected[0], atol=2e-4, rtol=1e-3
    )


class _ForgetfulAttention(MistralAttention):
    """Leaves the sliding window to the mask, which our attention does not read."""

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.config.sliding_window = window


@pytest.mark.parametrize("forgetful", [False, True])
def test_windows_wider_than_the_probe_are_kept(forgetful: bool) -> None:
    torch.manual_seed(0)
    stock = ARCHITECTURES["mistral"]().eval()
    stock.config.sliding_window = 60
    if forgetful:
        for layer in stock.model.layers:
            layer.self_attn.__class__ = _ForgetfulAttention
    expected = stock(ids(100)[None]).logits[0]
    fast = accelerate(stock, int8=False, threads=THREADS)
    assert fast.engine.paths is not forgetful
    found = fast.extend(ids(100), KVCache()).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_a_bias_of_some_projections_only_is_kept() -> None:
    torch.manual_seed(0)
    stock = tiny_module()
    for layer in stock.model.layers:
        layer.self_attn.q_proj.bias = nn.Parameter(torch.randn(layer.self_attn.q_proj.out_features))
        layer.mlp.up_proj.bias = nn.Parameter(torch.randn(48))
    expected = stock(ids(30)[None]).logits[0]
    found = accelerate(stock, int8=False, threads=THREADS).extend(ids(30), KVCache()).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    base = on_engine("llama", int8=False)
    whole = base.prefill(ids(50), KVCache())
    monkeypatch.setattr(base_module, "PREFILL_ROWS", 16)
    cache = KVCache()
    parts = base.prefill(ids(50), cache)
    assert cache.get_seq_length() == 50
    assert parts.logits.shape == (1, VOCAB)
    assert torch.equal(parts.logits, whole.logits)


def test_compaction_moves_rows_of_panels() -> None:
    base, tree = on_engine("llama", int8=False), tree_buffers(TREE, CPU)
    tokens, prompt = ids(tree.nodes, 2), ids(20)
    root = tree_buffers(dense_tree("r", [1]).limited(0), CPU)
    path = [0, 2, 6, 8]
    kept, fresh = KVCache(), KVCache()
    base.prefill(prompt, kept)
    kept.append(prompt.tolist())
    base.verify(tokens, tree.depths, tree.paths, kept)
    kept.accept(path, tokens[path].tolist())
    base.prefill(prompt, fresh)
    for token in tokens[path]:
        base.verify(token[None], root.depths, root.paths, fresh)
    for one, other in zip(kept.layers, fresh.layers, strict=True):
        assert one.rows == other.rows == 24
        assert torch.equal(one.keys[:, :, :3], other.keys[:, :, :3])
        assert torch.equal(one.values[:, :, :, :24], other.values[:, :, :, :24])


# Loading


def test_a_model_on_a_cpu_is_put_on_the_engine(model_folder: Path) -> None:
    names = {
        kind: medusa_cli.load(str(model_folder), options=options, offline=True).base.engine.name
        for kind, options in {
            "float32": LoadOptions(),
            "int8": LoadOptions(quantize="int8"),
            "stock": LoadOptions(stock=True),
            "half": LoadOptions(dtype="bfloat16"),
        }.items()
    }
    assert names == {
        "float32": "cpu float32", "int8": "cpu int8", "stock": "torch", "half": "torch"
    }  # fmt: skip


def test_int8_gives_the_tokens_of_int8_plain(model_folder: Path) -> None:
    options = LoadOptions(quantize="int8")
    plain = medusa_cli.load(str(model_folder), plain=True, options=options, offline=True)
    tree = str(model_folder / "all.json")
    drafted = medusa_cli.load(str(model_folder), tree=tree, options=options, offline=True)
    assert drafted.generate("Hello").token_ids == plain.generate("Hello").token_ids
    heads = drafted.heads
    assert heads is not None
    assert any(isinstance(child, Int8Linear) for child in heads.heads.modules())
    assert not any(isinstance(child, nn.Linear) for child in heads.heads.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quantize", "int4"], "--quantize must be one of none, int8, nf4"),
        (["--quantize", "nf4"], "needs a CUDA GPU; on a CPU there is int8"),
        (["--quantize", "int8", "--dtype", "bfloat16"], "drop --dtype"),
    ],
)
def test_what_cannot_be_quantised_is_said(
    model_folder: Path, options: list[str], message: str
) -> None:
    command = ["generate", "-m", str(model_folder), "-p", "Hi", "--device", "cpu", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert message in done.stderr


def test_bits_and_bytes_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_cli.models import loader

    monkeypatch.setattr(loader, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        loader._quantization(LoadOptions(quantize="nf4"), torch.device("cuda"))


def test_bits_and_bytes_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_cli.models import loader

    monkeypatch.setattr(loader, "find_spec", lambda name: name)
    four = loader._quantization(LoadOptions(quantize="nf4"), torch.device("cuda"))
    eight = loader._quantization(LoadOptions(quantize="int8"), torch.device("cuda"))
    assert four["quantization_config"].load_in_4bit
    assert four["quantization_config"].bnb_4bit_quant_type == "nf4"
    assert eight["quantization_config"].load_in_8bit


def test_a_seed_gives_the_same_text_under_any_tree(model_folder: Path) -> None:
    from medusa_cli import Limits, SamplingConfig

    sampling, limits = SamplingConfig(temperature=0.9, seed=4), Limits(max_new_tokens=40)
    options = LoadOptions(quantize="int8")
    texts = {
        medusa_cli.load(
            str(model_folder), plain=tree is None, tree=tree, options=options, offline=True
        )
        .generate("Hello", sampling=sampling, limits=limits)
        .token_ids
        for tree in (None, "mc_sim_7b_63", str(model_folder / "all.json"))
    }
    assert len(texts) == 1


def test_llama_with_biases_and_another_head_size() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=20, attention_bias=True,
        mlp_bias=True, max_position_embeddings=CONTEXT, initializer_range=0.3,
    )  # fmt: skip
    stock = LlamaForCausalLM(config).eval()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected = stock(ids(30)[None]).logits[0]
    fast = accelerate(stock, int8=False, threads=THREADS)
    kinds = [type(child) for child in fast.module.modules()]
    assert FusedAttention in kinds
    assert FusedMLP in kinds
    torch.testing.assert_close(
        fast.extend(ids(30), KVCache()).logits, expected, atol=1e-3, rtol=1e-3
    )
