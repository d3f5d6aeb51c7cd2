"""Loading a base model and its tokenizer: device, precision, and errors that say what is wrong."""

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from medusa_cli.errors import CheckpointError, MedusaError, UnsupportedModelError, UsageError
from medusa_cli.models.base import BaseModel
from medusa_cli.models.progress import Report, Stage
from medusa_cli.models.sources import Source
from medusa_cli.models.storage import human_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRANSFORMERS_RANGE = ">=5.24,<6"
LARGE_BYTES = 1_000_000_000  # a load from this size on is announced
HALF = (torch.float16, torch.bfloat16)
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
QUANTIZE = ("none", "int8", "nf4")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load, in the words of the command line.

    Attributes:
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        device_map: accelerate's device map by name (`auto`, `balanced`, ...); wins over `device`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        trust_remote_code: run model code that comes with the checkpoint.
        quantize: `none`; `int8`; or `nf4`, on a CUDA GPU only.
        compile: compile the layers of a model that torch computes.
        stock: keep every module as transformers makes it; for comparison.
    """

    device: str = "auto"
    device_map: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    quantize: str = "none"
    compile: bool = False
    stock: bool = False


def load_base(source: Source, options: LoadOptions, report: Report) -> BaseModel:
    """Loads the stock transformers class onto its device.

    Raises:
        CheckpointError: the folder holds no model that transformers can load.
        UnsupportedModelError: transformers is out of range, or tree attention would not be exact.
        UsageError: the device is not there, or cannot do what is asked of it.
    """
    _check_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = {"trust_remote_code": options.trust_remote_code}
    device = _device(options.device)
    quantization = _quantization(options, device)
    if options.device_map not in (None, *DEVICE_MAPS):
        raise UsageError(
            f"--device-map must be one of {', '.join(DEVICE_MAPS)}, not '{options.device_map}'"
        )
    try:
        config = AutoConfig.from_pretrained(source.folder, **trust)
        dtype = _dtype(options, device, config)
        _announce(source, config, dtype, device, report)
        module = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            device_map=options.device_map or {"": device},
            **quantization,
            **trust,
        )
    except MedusaError:
        raise
    except Exception as error:
        # What transformers raises on damaged files is open-ended; lack of memory is not damage.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise
        raise _unloadable(f"'{source.name}' in {source.folder}", error) from None
    base = _on_engine(module, options)
    if options.compile:
        from medusa_cli.models.compiling import compile_layers

        compile_layers(base, report)
    return base


def load_tokenizer(source: Source, options: LoadOptions) -> "PreTrainedTokenizerBase":
    """The tokenizer that lies beside the base model.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=options.trust_remote_code
        )
    except Exception as error:  # noqa: BLE001  # what bad files raise is open-ended
        raise _unloadable(f"the tokenizer in {source.folder}", error) from None


def _on_engine(module: "PreTrainedModel", options: LoadOptions) -> BaseModel:
    """The model on the CPU engine where that can take it, else as it is."""
    if options.stock or module.device.type != "cpu":
        return BaseModel(module)
    from medusa_cli.models.cpu import engine

    int8 = options.quantize == "int8"
    if engine.fits(module):
        if options.compile:
            raise UsageError(
                "--compile has nothing to do here: "
                "the CPU engine's layers are compiled already. Drop it"
            )
        return engine.accelerate(module, int8=int8, threads=torch.get_num_threads())
    if int8:
        raise UsageError(
            "--quantize int8 on a CPU takes a model that is all there in float32: "
            "drop --dtype and --device-map, or choose an unquantised checkpoint"
        )
    return BaseModel(module)


def _quantization(options: LoadOptions, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told so that it quantises, on a GPU; on a CPU the engine does."""
    kind = options.quantize
    if kind not in QUANTIZE:
        raise UsageError(f"--quantize must be one of {', '.join(QUANTIZE)}, not '{kind}'")
    if kind == "none" or (kind == "int8" and device.type == "cpu"):
        return {}
    if device.type != "cuda":
        raise UsageError(f"--quantize {kind} needs a CUDA GPU; on a CPU there is int8")
    if find_spec("bitsandbytes") is None:
        raise UsageError(f"--quantize {kind} needs bitsandbytes: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_8bit=kind == "int8", load_in_4bit=kind == "nf4", bnb_4bit_quant_type="nf4"
        )
    }


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device must be auto, cpu, cuda, cuda:N or mps, not '{name}'") from None
    there = {
        "cpu": device.index in (None, 0),
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise UsageError(f"--device {name}: there is no such device here; use --device auto")
    return device


def _dtype(options: LoadOptions, device: torch.device, config: Any) -> torch.dtype:
    """Half precision on an accelerator, float32 on a CPU, unless the user says otherwise."""
    if options.dtype != "auto":
        if options.dtype not in DTYPES:
            raise UsageError(f"--dtype must be auto, {', '.join(DTYPES)}, not '{options.dtype}'")
        return DTYPES[options.dtype]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config.get_text_config(), "dtype", None)
    if own in HALF and (own is not torch.bfloat16 or _has_bfloat16()):
        return torch.float16 if own is torch.float16 else torch.bfloat16
    return torch.bfloat16 if _has_bfloat16() else torch.float16


def _has_bfloat16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def _announce(
    source: Source, config: Any, dtype: torch.dtype, device: torch.device, report: Report
) -> None:
    """Says what a large load needs and what there is; the user can stop it in time."""
    import psutil

    needed = source.entry.parameters * dtype.itemsize
    if needed == 0:
        files = [p for p in source.folder.iterdir() if p.suffix in (".safetensors", ".bin")]
        stored = getattr(config.get_text_config(), "dtype", None) or dtype
        needed = sum(p.stat().st_size for p in files) * dtype.itemsize // stored.itemsize
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if needed > min(LARGE_BYTES, free):
        report(
            Stage(
                f"loading {source.name}: needs about {human_bytes(needed)} of "
                f"{'GPU ' if on_gpu else ''}memory, {human_bytes(free)} are free"
            )
        )


def _unloadable(what: str, error: Exception) -> CheckpointError:
    reason = (str(error) or type(error).__name__).strip().splitlines()[0]
    return CheckpointError(f"{what} cannot be loaded: {reason}")


def _check_transformers() -> None:
    from packaging.specifiers import SpecifierSet

    installed = version("transformers")
    if not SpecifierSet(TRANSFORMERS_RANGE).contains(installed, prereleases=True):
        raise UnsupportedModelError(
            f"transformers {installed} is installed, but medusa needs {TRANSFORMERS_RANGE}: "
            f'pip install "transformers{TRANSFORMERS_RANGE}"'
        )
