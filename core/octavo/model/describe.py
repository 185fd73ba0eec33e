"""What a model is, from its files' headers and configs, before any weight is read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from octavo.contract import DecoderSpec, Weight
from octavo.errors import ModelError, UnsupportedError, shown
from octavo.gguf_file import GGUFFile
from octavo.model.checkpoint import Checkpoint, read_json
from octavo.model.config import ConfigView
from octavo.model.description import ModelDescription, NativeModel
from octavo.model.encoder import describe_encoder, is_encoder
from octavo.model.families import FAMILIES, Family
from octavo.model.families.rope import num_positions
from octavo.model.files import ModelFiles
from octavo.model.formats import open_folder, weight_format
from octavo.model.generation import read_generation, token_ids
from octavo.model.gguf import GGUF_IGNORED, GGUF_NAMES, PERMUTED, GGUFCheckpoint
from octavo.model.gguf_config import gguf_config
from octavo.model.hf_describe import describe_hf
from octavo.model.names import SAVED_ALONE, NameTable
from octavo.model.precision import DENSE, Precision
from octavo.model.slots import Slot, slots
from octavo.model.soundness import check_sizes, check_spec
from octavo.model.weights import Filling, dummy_weights, makes_4_bits, plan_weights, read_weights

__all__ = ["ModelDescription", "describe_model", "describe_native", "load_weights"]

ModelImpl: TypeAlias = Literal["auto", "native", "hf"]
# The importance [K] of columns by slot name, see `quantize`, of what is planned to be read.
Calibrate: TypeAlias = Callable[[Sequence[Filling], Checkpoint], Mapping[str, torch.Tensor]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def describe_model(files: ModelFiles, max_model_len: int | None = None, impl: ModelImpl = "native") -> ModelDescription:
    """Describe a model. Reads configs and headers, no weights, and checks that they fit each other.

    Args:
        files: of the model.
        max_model_len: tokens of the longest request, on which some rope scalings depend; None: all that the
            model was made for.
        impl: whose program: one of ours ("native"), transformers' ("hf"), or ours where a family covers the model
            and transformers' where none does ("auto").

    Raises:
        ModelError: files are missing, broken or contradict each other. One line.
        UnsupportedError: no family covers the model, nor does transformers where it may.

    """
    if is_encoder(files):
        if impl == "native":
            raise UnsupportedError(f"{files.path} is an encoder, which runs through transformers: set model_impl to hf")
        return describe_encoder(files)
    if impl == "hf":
        return describe_hf(files, max_model_len)
    try:
        return describe_native(files, max_model_len)
    except UnsupportedError as error:
        if impl == "native" or files.kind == "gguf":
            raise
        try:
            return describe_hf(files, max_model_len)
        except UnsupportedError as other:
            raise UnsupportedError(f"{error}; nor does it run through transformers: {other}") from other


def describe_native(files: ModelFiles, max_model_len: int | None = None) -> NativeModel:
    """Describe a model of a family; see `describe_model`."""
    if files.kind == "gguf":
        return _describe_gguf(files, max_model_len)
    return _describe_folder(files, max_model_len)


def load_weights(
    description: NativeModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    seed_dummy: int | None = None,
    precision: Precision = DENSE,
    calibrate: Calibrate | None = None,
) -> dict[str, Weight]:
    """The weights by slot name (see `slots`), in `dtype` on `device`, or quantised.

    Args:
        description: of the model.
        dtype: of the weights, but for slots that have one of their own.
        device: where they go.
        progress: show a bar on stderr.
        seed_dummy: make random weights from this seed instead of reading any.
        precision: which formats packed weights keep, and which are made of floats.
        calibrate: asked where matrices are rounded to 4 bits, for the importance of their columns.

    Raises:
        ModelError: the checkpoint is missing, broken, or does not fit the config. Found before anything is read.

    """
    if seed_dummy is not None:
        return dummy_weights(
            description.spec, seed=seed_dummy, dtype=dtype, device=device, progress=progress, precision=precision
        )
    checkpoint = _open_checkpoint(description)
    plan = plan_weights(description.spec, description.names, checkpoint)
    importance = calibrate(plan, checkpoint) if calibrate and makes_4_bits(plan, checkpoint, precision) else None
    return read_weights(
        plan, checkpoint, dtype=dtype, device=device, progress=progress, precision=precision, importance=importance
    )


def _open_checkpoint(description: NativeModel) -> Checkpoint:
    files = description.files
    if files.kind == "gguf":
        return GGUFCheckpoint(GGUFFile(files.path))
    return open_folder(files.path, description.quantization)


# ---- folders in Hugging Face layout


def _describe_folder(files: ModelFiles, max_model_len: int | None) -> NativeModel:
    path = files.path / "config.json"
    if not path.is_file():
        raise ModelError(f"folder {files.path} has no config.json, so it is not a model in Hugging Face layout")
    whole = read_json(path)
    values = _text_part(whole)
    _refuse_what_no_family_says(values, path)
    quantization = _quantization(values, files.path)
    if quantization is not None:
        weight_format(quantization, str(path))
    family = _family(values, path)
    c = ConfigView(values, str(path), family.defaults, family.aliases)
    max_position, spec = _build(family, c, max_model_len, path)
    names = NameTable(family.names, family.ignored)
    checkpoint = open_folder(files.path, quantization) if any(files.path.glob("*.safetensors*")) else None
    num_parameters, dtype = None, c.get("dtype", c.get("torch_dtype"))
    headless = checkpoint is not None and _is_headless(spec, names, checkpoint)
    if headless:  # its head is never asked for, so it may be whatever is there
        spec = replace(spec, tied_embeddings=True)
    if checkpoint:
        plan_weights(spec, names, checkpoint)
        num_parameters = sum(map(prod, checkpoint.shapes.values()))
    return NativeModel(
        files=files,
        architecture=family.model_type,
        vocab_size=spec.vocab_size,
        spec=spec,
        names=names,
        max_position=max_position,
        **vars(read_generation(files.path, whole, values)),
        dtype=DTYPES.get(str(dtype).removeprefix("torch."), checkpoint.dtype if checkpoint else torch.float32),
        num_parameters=num_parameters,
        embeds_as="a decoder saved without its head" if headless else "",
        quantization=quantization,
    )


def _is_headless(spec: DecoderSpec, names: NameTable, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a decoder saved by itself, as embedding models are, less the head that it once had."""
    root = names.root(checkpoint.shapes)
    head = [checkpoint.weight(part) for option in names.options(Slot("head", ()), root) for part in option]
    return not spec.tied_embeddings and root == SAVED_ALONE and not any(head)


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


def _quantization(values: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """The quantization_config; older writers of GPTQ left it in a file of its own, less the method's name."""
    quantization = values.get("quantization_config")
    old = folder / "quantize_config.json"
    if quantization is None and old.is_file():
        return {"quant_method": "gptq"} | read_json(old)
    if quantization is not None and not isinstance(quantization, dict):
        raise ModelError(
            f"{folder / 'config.json'}: quantization_config must be an object, it is {shown(quantization)}"
        )
    return quantization


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
            raise ModelError(f"max_position_embeddings must be a positive integer, it is {shown(most)}")
        check_sizes(c)
        max_position = num_positions(c, max_model_len)
        spec = family.build(c, max_model_len or max_position)
        check_spec(spec)
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


# ---- GGUF files


def _describe_gguf(files: ModelFiles, max_model_len: int | None) -> NativeModel:
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
    return NativeModel(
        files=files,
        architecture=family.model_type,
        vocab_size=spec.vocab_size,
        spec=spec,
        names=names,
        max_position=max_position,
        eos_token_ids=token_ids([end for end in ends if end is not None], files.path),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        sampling_defaults={},
        dtype=checkpoint.dtype,
        num_parameters=sum(map(prod, checkpoint.shapes.values())),
    )
