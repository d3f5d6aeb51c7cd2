"""Puts a loaded model on the CPU engine, module by module, each checked against the stock one.

The model's class and its `forward` stay transformers' own; modules on the instance are replaced,
and an attention function is registered. Whatever would not compute what the stock module computes
stays stock.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from medusa_cli.models.base import BaseModel, Engine
from medusa_cli.models.cache import KVCache, TreeCacheLayer
from medusa_cli.models.cpu import layer
from medusa_cli.models.cpu.cache import PanelCacheLayer
from medusa_cli.models.cpu.jobs import helper
from medusa_cli.models.cpu.layer import FusedLayer
from medusa_cli.models.cpu.modules import (
    FloatLinear,
    FusedAttention,
    FusedMLP,
    Int8Linear,
    PackedEmbedding,
    PackedLinear,
    RMSNorm,
)
from medusa_cli.models.cpu.paths import PathAttention
from medusa_cli.models.cpu.pool import Pool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-3  # largest difference to the stock module's output, in its standard deviations
INT8_TOLERANCE = 3e-2  # a last bit before the rounding of activations is more than that behind it
PROBE_ROWS, PROBE_PROMPT = 5, 24


class CpuEngine(Engine):
    """Packed linear layers, and attention along paths where the model's attention allows it."""

    own_threads = True

    def __init__(self, int8: bool, pool: Pool, *, paths: bool) -> None:
        self.name = f"cpu {'int8' if int8 else 'float32'}"
        self.quantized = "int8" if int8 else None
        self.paths = paths
        self.cache_layer = PanelCacheLayer if paths else TreeCacheLayer
        self.pool, self._linear = pool, Int8Linear if int8 else FloatLinear

    def pack(self, module: nn.Module) -> nn.Module:
        """Packs the linear layers of a module, or a linear layer itself.

        Experts of mixture models stay as they are: a step reads few of them.
        """
        for parent, name, child in list(_children(module)):
            setattr(parent, name, self._packed(child))
        return self._packed(module)

    def weight_rows(self, linear: nn.Module, rows: Tensor) -> Tensor:  # [R] -> [R, K]
        """Rows of a linear layer's weight, as they are used."""
        assert isinstance(linear, PackedLinear)
        return linear.weight_rows(rows)

    def _packed(self, module: nn.Module) -> nn.Module:
        from transformers.pytorch_utils import Conv1D

        if type(module) is nn.Linear:
            return self._linear(module.weight, module.bias, self.pool)
        if type(module) is Conv1D:
            weight, bias = cast(tuple[Tensor, Tensor], (module.weight, module.bias))
            return self._linear(weight.T, bias, self.pool)
        return module


def fits(module: "PreTrainedModel") -> bool:
    """Whether the engine can take a model: float32, all of it on the CPU, not quantised."""
    on_cpu = all(t.device.type == "cpu" for t in (*module.parameters(), *module.buffers()))
    whole = all(t.dtype is torch.float32 for t in module.parameters())
    return on_cpu and whole and getattr(module, "hf_quantizer", None) is None


@torch.inference_mode()
def accelerate(module: "PreTrainedModel", *, int8: bool, threads: int) -> BaseModel:
    """Replaces modules of a model in place.

    Args:
        int8: 8-bit weights in the linear layers.
        threads: that products and attention are spread over.

    Raises:
        UnsupportedModelError: rows of the model's state cannot be rolled back.
    """
    pool = Pool(threads, helper)
    stock = _probe(BaseModel(module))
    _replace(module, _rms_norm)
    _replace(module, _fused_mlp)
    engine, attention = CpuEngine(int8, pool, paths=True), PathAttention(pool)
    before = module.config._attn_implementation
    _register_paths(module, attention)
    along_paths = BaseModel(module, engine)
    windows = attention.windows = []
    window = along_paths.layout.window
    # The probe is shorter than most windows: attention must be told of them.
    if _computes(along_paths, stock) and (window is None or window in windows):
        fused_windows = attention.windows = []
        fused = partial(_fused_attention, attention=attention)
        _replace(module, fused, lambda: _computes(along_paths, stock) and fused_windows == windows)
    else:
        engine = CpuEngine(int8, pool, paths=False)
        module.set_attn_implementation(before)
    embedding, lm_head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = type(embedding) is nn.Embedding and embedding.weight is lm_head.weight
    engine.pack(module)
    if tied:
        module.set_input_embeddings(PackedEmbedding(module.get_output_embeddings()))
    attention.windows = None
    base = BaseModel(module, engine)
    in_parts = _probe(base)
    tolerance = INT8_TOLERANCE if int8 else TOLERANCE
    _replace(module, _fused_layer, lambda: _computes(base, in_parts, tolerance))
    return base


def _computes(base: BaseModel, wanted: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether a model still gives the probe's logits."""
    try:
        return _agree(_probe(base), wanted, tolerance)
    except Exception:  # noqa: BLE001  # its own code may call what was replaced in another way
        return False


def _probe(base: BaseModel) -> Tensor:  # [6, V]
    """Logits of a made-up prompt's last row and of a small tree behind it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(base.vocab_size, (PROBE_PROMPT + 5,), generator=generator)
    cache = KVCache()
    prompt = base.prefill(ids[:PROBE_PROMPT], cache)
    depths = torch.tensor([0, 1, 1, 2, 2])
    paths = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3], [0, 2, 4]])
    tree = base.verify(ids[PROBE_PROMPT:], depths, paths, cache)
    return torch.cat([prompt.logits, tree.logits])


def _register_paths(module: "PreTrainedModel", attention: PathAttention) -> None:
    """Makes the model's attention modules call our attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"medusa-paths-{attention.pool.threads}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # read with other caches than ours only
    module.set_attn_implementation(name)


def _replace(
    module: nn.Module,
    make: Callable[[nn.Module], nn.Module | None],
    agrees: Callable[[], bool] = lambda: True,
) -> int:
    """Replaces each child that `make` has something for, unless the model then disagrees."""
    replaced = []
    for parent, name, child in list(_children(module)):
        new = make(child)
        if new is not None:
            replaced.append((parent, name, child))
            setattr(parent, name, new)
    if replaced and not agrees():
        for parent, name, child in replaced:
            setattr(parent, name, child)
        return 0
    return len(replaced)


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for path, parent in module.named_modules():
        if ".experts" not in path:
            yield from ((parent, name, child) for name, child in parent.named_children())


def _rms_norm(stock: nn.Module) -> nn.Module | None:
    weight = getattr(stock, "weight", None)
    epsilon = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    if "RMSNorm" not in type(stock).__name__ or weight is None or not isinstance(epsilon, float):
        return None
    candidates = (RMSNorm(weight, epsilon), RMSNorm(1 + weight, epsilon))
    return next((new for new in candidates if _same(stock, new, weight.shape[0])), None)


def _fused_mlp(stock: Any) -> nn.Module | None:
    names = ("gate_proj", "up_proj", "down_proj")
    if not _has_linears(stock, names) or not isinstance(getattr(stock, "act_fn", None), nn.Module):
        return None
    gate, up, down = (getattr(stock, name) for name in names)
    joined = _joined([gate, up])
    if joined is None or gate.out_features != up.out_features:
        return None
    new = FusedMLP(joined, down, stock.act_fn, gate.out_features)
    return new if _same(stock, new, gate.in_features) else None


def _fused_attention(stock: Any, attention: Any) -> nn.Module | None:
    if not _has_linears(stock, ("q_proj", "k_proj", "v_proj", "o_proj")):
        return None
    known = all(hasattr(stock, name) for name in ("head_dim", "scaling", "layer_idx"))
    if not known or not getattr(stock, "use_rope", True):
        return None
    joined = _joined([stock.q_proj, stock.k_proj, stock.v_proj])
    return None if joined is None else FusedAttention(stock, joined, attention)


def _fused_layer(stock: nn.Module) -> nn.Module | None:
    return FusedLayer(stock) if layer.fits(stock) else None


def _has_linears(module: nn.Module, names: tuple[str, ...]) -> bool:
    layers = [getattr(module, name, None) for name in names]
    return all(type(layer) is nn.Linear for layer in layers)


def _joined(parts: list[nn.Linear]) -> nn.Linear | None:
    """One layer with the outputs of several; theirs become views of its weights.

    None where only some have a bias.
    """
    has_bias = parts[0].bias is not None
    if any((part.bias is not None) != has_bias for part in parts):
        return None
    with torch.device("meta"):
        joined = nn.Linear(parts[0].in_features, sum(p.out_features for p in parts), bias=has_bias)
    state = {"weight": torch.cat([part.weight for part in parts])}
    if has_bias:
        state["bias"] = torch.cat([part.bias for part in parts])
    joined.load_state_dict(state, assign=True)
    first = 0
    for part in parts:
        last = first + part.out_features
        part.weight = nn.Parameter(joined.weight[first:last], requires_grad=False)
        first = last
    return joined.requires_grad_(False)


def _same(stock: nn.Module, new: nn.Module, width: int) -> bool:
    """Whether two modules agree on random rows."""
    x = torch.randn(1, PROBE_ROWS, width, generator=torch.Generator().manual_seed(0))
    with suppress(TypeError, RuntimeError, AttributeError):  # it is called in another way
        return _agree(new(x), stock(x))
    return False


def _agree(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((found - wanted).abs().max() <= tolerance * wanted.std())
