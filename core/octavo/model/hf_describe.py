"""What a model is that transformers runs: its config by transformers' classes, its attention by a probe."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ModelError, OctavoError, UnsupportedError
from octavo.model.checkpoint import read_json
from octavo.model.description import HfModel
from octavo.model.files import ModelFiles
from octavo.model.generation import read_generation
from octavo.model.hf_probe import Probed, probe
from octavo.model.hf_rope import settle_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["causal_class", "describe_hf", "hf_config", "quiet"]

STATEFUL_LAYERS = ("linear", "conv", "mamba", "recurrent")  # parts of the names of layer types


def describe_hf(files: ModelFiles, max_model_len: int | None = None) -> HfModel:
    """Describe a model that transformers has a class for. No weights are read, and none of the model's own code runs.

    Args:
        files: of the model.
        max_model_len: tokens of the longest request; None: all that the model was made for.

    Raises:
        ModelError: files are missing or broken. One line.
        UnsupportedError: transformers has no such model, or it cannot run with paged attention; the line says why.

    """
    if files.kind == "gguf":
        raise UnsupportedError(
            f"{files.path}: GGUF files run natively; model_impl hf takes folders in Hugging Face layout"
        )
    path = files.path / "config.json"
    if not path.is_file():
        raise ModelError(f"folder {files.path} has no config.json, so it is not a model in Hugging Face layout")
    whole = read_json(path)
    with _refused(path), quiet():
        config = hf_config(files.path)
        architecture = str(config.model_type)
        cls = causal_class(config)
        _refuse_class(cls, config)
        max_position = _max_position(config, max_model_len)
        probed = _probe(cls, files.path, max_model_len or max_position)
    text = config.get_text_config()
    return HfModel(
        files=files,
        architecture=architecture,
        vocab_size=probed.vocab_size,
        max_position=max_position,
        **vars(read_generation(files.path, whole, text.to_dict())),
        dtype=_dtype(config, text),
        num_parameters=probed.num_parameters,
        class_name=cls.__name__,
        layers=probed.layers,
        body=probed.body,
        width=probed.width * max(1, _number(text, "num_experts_per_tok", 1)),
    )


def hf_config(folder: Path) -> "PretrainedConfig":
    """The config by transformers' class.

    Raises:
        UnsupportedError: transformers has none, or values that make none.

    """
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a foreign config makes of a library
        kind = read_json(folder / "config.json").get("model_type")
        if "auto_map" in read_json(folder / "config.json"):
            raise UnsupportedError(
                f"model type {kind!r} needs code of its own, and no model's own code is run"
            ) from error
        text = " ".join(str(error).split())
        raise UnsupportedError(f"transformers makes no config of it ({type(error).__name__}: {text[:200]})") from error
    return config


def causal_class(config: "PretrainedConfig") -> Any:
    """Transformers' class of a language model with such a config.

    Raises:
        UnsupportedError: there is none.

    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"an encoder-decoder ({config.model_type}); only decoders are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"transformers has no causal language model of type {config.model_type!r}")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


@contextmanager
def quiet(progress: bool = False) -> Iterator[None]:
    """Transformers' log says errors alone meanwhile: what is amiss, we say in a line of our own. Its bars are shown
    where `progress` says so.
    """
    from transformers.utils import logging as of_transformers

    log, had_bars = logging.getLogger("transformers"), of_transformers.is_progress_bar_enabled()
    set_bars: dict[bool, Any] = {True: of_transformers.enable_progress_bar, False: of_transformers.disable_progress_bar}
    level = log.level
    log.setLevel(logging.ERROR)
    set_bars[progress]()
    try:
        yield
    finally:
        log.setLevel(level)
        set_bars[bool(had_bars)]()


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error
    except OctavoError:
        raise
    except Exception as error:  # foreign values in foreign code
        text = " ".join(str(error).split())
        raise UnsupportedError(f"{path}: transformers cannot say ({type(error).__name__}: {text[:200]})") from error


def _refuse_class(cls: Any, config: "PretrainedConfig") -> None:
    """What a class or a config tells of itself that rules it out."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedError(f"weights quantised by {method}; transformers' models are read in float formats alone")
    if getattr(cls, "_is_stateful", False):
        raise UnsupportedError(f"{cls.__name__} keeps a recurrent state, and only keys and values are paged")
    kinds = {str(kind) for kind in getattr(config.get_text_config(), "layer_types", None) or ()}
    stateful = sorted(kind for kind in kinds if any(word in kind for word in STATEFUL_LAYERS))
    if stateful:
        raise UnsupportedError(f"layers of type {', '.join(stateful)} keep a state, and only keys and values are paged")
    if not cls._can_set_attn_implementation():
        raise UnsupportedError(f"{cls.__name__} does not call attention through transformers' attention interface")
    missing = {"position_ids", "inputs_embeds"} - set(signature(cls.forward).parameters)
    if missing:
        raise UnsupportedError(f"the forward of {cls.__name__} takes no {', '.join(sorted(missing))}")


def _max_position(config: "PretrainedConfig", max_model_len: int | None) -> int:
    """Positions that the model was made for: what its config says, or else what the user does."""
    found = _number(config.get_text_config(), "max_position_embeddings", max_model_len or 0)
    if found < 1:
        raise UnsupportedError("its config does not say how many positions there are: set max_model_len")
    return found


def _probe(cls: Any, folder: Path, max_model_len: int) -> Probed:
    def make(implementation: str) -> torch.nn.Module:
        config = hf_config(folder)
        model: torch.nn.Module = cls._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
        settle_rope(model, max_model_len)
        return model

    num_layers = _number(hf_config(folder).get_text_config(), "num_hidden_layers", 0)
    return probe(make, num_layers, max_model_len)


def _dtype(config: "PretrainedConfig", text: "PretrainedConfig") -> torch.dtype:
    for one in (config, text):
        dtype = getattr(one, "dtype", None)
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return dtype
    return torch.float32


def _number(config: "PretrainedConfig", name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else default
