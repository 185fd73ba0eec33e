"""What a model is, from its files' headers and configs, before any weight is read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo.contract import DecoderSpec
from octavo.errors import ModelError, UnsupportedError
from octavo.gguf_file import GGUFFile
from octavo.model.checkpoint import Checkpoint, SafetensorsCheckpoint, read_json
from octavo.model.config import ConfigView
from octavo.model.families import FAMILIES, Family
from octavo.model.families.rope import num_positions
from octavo.model.files import ModelFiles
from octavo.model.gguf import GGUF_IGNORED, GGUF_NAMES, PERMUTED, GGUFCheckpoint
from octavo.model.gguf_config import gguf_config
from octavo.model.names import NameTable
from octavo.model.slots import slots
from octavo.model.weights import dummy_weights, plan_weights, read_weights

__all__ = ["ModelDescription", "describe_model", "load_weights"]

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelDescription:
    """Everything that is known of a model before its weights are read.

    Attributes:
        files: where it lies.
        architecture: its model type ("llama").
        spec: the decoder.
        names: what its checkpoint calls the weights.
        max_position: positions that it was made for.
        eos_token_ids: each of them ends a sequence.
        bos_token_id: begins one, or None.
        sampling_defaults: the model's own sampling parameters (temperature, top_k, top_p, min_p,
            repetition_penalty), those that it has.
        dtype: the checkpoint's; for quantised ones what to compute in.
        num_parameters: numbers in its checkpoint, or None where there are no weights (dummy ones can be made).

    """

    files: ModelFiles
    architecture: str
    spec: DecoderSpec
    names: NameTable
    max_position: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    sampling_defaults: Mapping[str, Any]
    dtype: torch.dtype
    num_parameters: int | None


def describe_model(files: ModelFiles, max_model_len: int | None = None) -> ModelDescription:
    """Describe a model. Reads configs and headers, no weights, and checks that they fit each other.

    Args:
        files: of the model.
        max_model_len: tokens of the longest request, on which some rope scalings depend; None: all that the
            model was made for.

    Raises:
        ModelError: files are missing, broken or contradict each other. One line.
        UnsupportedError: no family covers the model.

    """
    if files.kind == "gguf":
        return _describe_gguf(files, max_model_len)
    return _describe_folder(files, max_model_len)


def load_weights(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    seed_dummy: int | None = None,
) -> dict[str, torch.Tensor]:
    """The weights by slot name (see `slots`), in `dtype` on `device`.

    Args:
        description: of the model.
        dtype: of the weights, but for slots that have one of their own.
        device: where they go.
        progress: show a bar on stderr.
        seed_dummy: make random weights from this seed instead of reading any.

    Raises:
        ModelError: the checkpoint is missing, broken, or does not fit the config. Found before anything is read.

    """
    if seed_dummy is not None:
        return dummy_weights(description.spec, seed=seed_dummy, dtype=dtype, device=device, progress=progress)
    checkpoint = _open_checkpoint(description.files)
    plan = plan_weights(description.spec, description.names, checkpoint)
    return read_weights(plan, checkpoint, dtype=dtype, device=device, progress=progress)


def _open_checkpoint(files: ModelFiles) -> Checkpoint:
    return GGUFCheckpoint(GGUFFile(files.path)) if files.kind == "gguf" else SafetensorsCheckpoint(files.path)


# ---- folders in Hugging Face layout


def _describe_folder(files: ModelFiles, max_model_len: int | None) -> ModelDescription:
    path = files.path / "config.json"
    if not path.is_file():
        raise ModelError(f"folder {files.path} has no config.json, so it is not a model in Hugging Face layout")
    whole = read_json(path)
    values = _text_part(whole)
    _refuse_what_no_family_says(values, path)
    family = _family(values, path)
    c = ConfigView(values, str(path), family.defaults, family.aliases)
    max_position, spec = _build(family, c, max_model_len, path)
    names = NameTable(family.names, family.ignored)
    checkpoint = SafetensorsCheckpoint(files.path) if any(files.path.glob("*.safetensors*")) else None
    num_parameters, dtype = None, c.get("dtype", c.get("torch_dtype"))
    if checkpoint:
        plan_weights(spec, names, checkpoint)
        num_parameters = sum(map(prod, checkpoint.shapes.values()))
    generation_path = files.path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    eos = generation.get("eos_token_id", whole.get("eos_token_id", values.get("eos_token_id")))
    bos = generation.get("bos_token_id", whole.get("bos_token_id", values.get("bos_token_id")))
    return ModelDescription(
        files=files,
        architecture=family.model_type,
        spec=spec,
        names=names,
        max_position=max_position,
        eos_token_ids=_token_ids(eos, path),
        bos_token_id=next(iter(_token_ids(bos, path)), None),
        sampling_defaults={key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None},
        dtype=DTYPES.get(str(dtype).removeprefix("torch."), checkpoint.dtype if checkpoint else torch.float32),
        num_parameters=num_parameters,
    )


def _text_part(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's own config, where a model of several parts nests it."""
    nested = whole.get("text_config")
    if not isinstance(nested, dict):
        return whole
    shared = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    return {key: whole[key] for key in shared if key in whole} | nested


def _refuse_what_no_family_says(values: Mapping[str, Any], path: Path) -> None:
    if values.get("is_encoder_decoder"):
        raise UnsupportedError(f"{path}: an encoder-decoder ({values.get('model_type')}); only decoders are served")
    quantization = values.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "an unnamed method")
        raise UnsupportedError(
            f"{path}: weights quantised by {method}; read are float32, float16 and bfloat16 weights, and GGUF files"
        )


def _family(values: Mapping[str, Any], path: Path) -> Family:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(
            f"{path}: model type {model_type!r} is not supported, supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def _build(family: Family, c: ConfigView, max_model_len: int | None, path: Path) -> tuple[int, DecoderSpec]:
    """How many positions the model serves, and its spec."""
    with _foreign_values(path, family.model_type):
        most = c.max_position_embeddings
        if not isinstance(most, int) or most < 1:
            raise ModelError(f"max_position_embeddings must be a positive integer, it is {most!r}")
        max_position = num_positions(c, max_model_len)
        spec = family.build(c, max_model_len or max_position)
        for slot in slots(spec):
            if not all(isinstance(n, int) and n > 0 for n in slot.shape):
                raise ValueError(f"{slot.name} would have shape {list(slot.shape)}")
        return max_position, spec


@contextmanager
def _foreign_values(path: Path, model: str) -> Iterator[None]:
    """Configs are somebody else's data: values of the wrong type or range surface wherever they are used."""
    try:
        yield
    except ModelError as error:
        text = str(error)
        raise type(error)(text if text.startswith(str(path)) else f"{path}: {text}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ModelError(f"{path}: values that make no {model} model ({what})") from error


def _token_ids(value: Any, path: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{path}: token ids must be integers, they are {json.dumps(value)[:100]}")
    return frozenset(ids)


# ---- GGUF files


def _describe_gguf(files: ModelFiles, max_model_len: int | None) -> ModelDescription:
    file = GGUFFile(files.path)
    with _foreign_values(files.path, "GGUF"):
        family, config = gguf_config(file)
    checkpoint = GGUFCheckpoint(file)
    c = ConfigView(config, str(files.path), family.defaults, family.aliases)
    max_position, spec = _build(family, c, max_model_len, files.path)
    permuted = family.gguf is not None and family.gguf.permuted
    names = NameTable({**GGUF_NAMES, **(PERMUTED if permuted else {})}, GGUF_IGNORED)
    plan_weights(spec, names, checkpoint)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = (file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return ModelDescription(
        files=files,
        architecture=family.model_type,
        spec=spec,
        names=names,
        max_position=max_position,
        eos_token_ids=_token_ids([end for end in ends if end is not None], files.path),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        sampling_defaults={},
        dtype=checkpoint.dtype,
        num_parameters=sum(map(prod, checkpoint.shapes.values())),
    )
