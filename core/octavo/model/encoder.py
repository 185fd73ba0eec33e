"""Encoders (the line of BERT): every token sees the whole prompt, so there is nothing to page and nothing to chunk.

They run as transformers has them, whole prompts side by side, and give final hidden states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from octavo.errors import ModelError, UnsupportedError
from octavo.model.checkpoint import read_json
from octavo.model.description import ModelDescription
from octavo.model.files import ModelFiles
from octavo.model.generation import read_generation
from octavo.model.sentence import max_seq_length, own_pooling

__all__ = ["ENCODERS", "Encoder", "EncoderModel", "describe_encoder", "is_encoder", "load_encoder"]

# Model types that are tried, and whether their first position is the one after the padding token's id.
ENCODERS: Mapping[str, bool] = {
    "albert": False,
    "bert": False,
    "camembert": True,
    "distilbert": False,
    "electra": False,
    "modernbert": False,
    "mpnet": True,
    "roberta": True,
    "xlm-roberta": True,
}
HEADS = (
    "pooler",
    "cls",
    "classifier",
    "lm_head",
    "head",
    "decoder",
    "vocab_",
    "discriminator_",
    "generator_",
    "qa_",
    "predictions",
)


@dataclass(frozen=True, kw_only=True)
class EncoderModel(ModelDescription):
    """A model that turns prompts into hidden states and generates nothing.

    Attributes:
        class_name: transformers' class.
        pad_token_id: what fills prompts up to the longest beside them.

    """

    class_name: str
    pad_token_id: int


def is_encoder(files: ModelFiles) -> bool:
    """Whether a model's config.json is that of an encoder."""
    path = files.path / "config.json"
    if files.kind != "folder" or not path.is_file():
        return False
    values = read_json(path)
    return values.get("model_type") in list(ENCODERS) and not values.get("is_decoder")


def describe_encoder(files: ModelFiles) -> EncoderModel:
    """Describe an encoder. No weights are read.

    Raises:
        ModelError: files are missing or broken. One line.
        UnsupportedError: its embeddings need a step that is not known.

    """
    from octavo.model.hf_describe import hf_config, quiet

    path = files.path / "config.json"
    with quiet():
        try:
            config = hf_config(files.path)
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: {error}") from error
    values = config.to_dict()
    own_pooling(files)
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    most = config.max_position_embeddings - (pad + 1 if ENCODERS[config.model_type] else 0)
    dtype = getattr(config, "dtype", None)
    return EncoderModel(
        files=files,
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        max_position=min(most, max_seq_length(files.path) or most),
        **vars(read_generation(files.path, values)),
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
        num_parameters=None,
        embeds_as=f"an encoder ({config.model_type})",
        class_name=_model_class(config).__name__,
        pad_token_id=pad,
    )


def load_encoder(
    description: EncoderModel, *, dtype: torch.dtype, device: torch.device, progress: bool, seed_dummy: int | None
) -> "Encoder":
    """The encoder with its weights, in `dtype` on `device`.

    Args:
        description: of the model.
        dtype: of weights and activations.
        device: where it runs.
        progress: show a bar on stderr.
        seed_dummy: make random weights from this seed instead of reading any.

    Raises:
        ModelError: the checkpoint is missing, broken, or does not fit the config. One line.

    """
    from octavo.model.hf_describe import hf_config, quiet

    config = hf_config(description.files.path)
    cls = _model_class(config)
    options = {"add_pooling_layer": False} if "add_pooling_layer" in signature(cls.__init__).parameters else {}
    with quiet(progress):
        if seed_dummy is None:
            model = _read(cls, description, dtype, options)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_dummy)
                model = cls._from_config(config, dtype=dtype, **options)
    return Encoder(description, model.to(device).eval().requires_grad_(False), device)


def _model_class(config: Any) -> Any:
    from transformers import MODEL_MAPPING

    return MODEL_MAPPING[type(config)]


def _read(cls: Any, description: EncoderModel, dtype: torch.dtype, options: dict[str, Any]) -> torch.nn.Module:
    folder = description.files.path
    if not any(folder.glob("*.safetensors*")):
        raise ModelError(f"folder {folder} has no safetensors, the one format of weights that is read from folders")
    try:
        model, info = cls.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below
            **options,
        )
    except Exception as error:  # whatever foreign files make of a library
        text = " ".join(str(error).split())
        raise ModelError(f"{folder}: {cls.__name__} cannot be loaded ({type(error).__name__}: {text[:300]})") from error
    prefix = f"{cls.base_model_prefix}."
    extra = [
        name
        for name in info["unexpected_keys"]
        if not name.removeprefix(prefix).startswith(HEADS) and not name.endswith(".position_ids")
    ]
    faults = [f"tensor {name} is missing" for name in sorted(info["missing_keys"])]
    faults += [
        f"tensor {name} has shape {list(found)}, expected is {list(expected)}"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    faults += [f"tensor {name} has no place" for name in sorted(extra)]
    if faults:
        more = f", and {len(faults) - 1} more such" if len(faults) > 1 else ""
        raise ModelError(f"{folder}: the weights are not those of the {cls.__name__} in config.json: {faults[0]}{more}")
    return model  # type: ignore[no-any-return]


class Encoder:
    """Runs whole prompts."""

    def __init__(self, description: EncoderModel, model: torch.nn.Module, device: torch.device) -> None:
        self._pad_token_id = description.pad_token_id
        self._model = model
        self._device = device

    def hidden(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The final hidden states of each prompt, [its tokens, H] float32 in host memory."""
        longest = max(map(len, prompts))
        padded = [[*prompt, *[self._pad_token_id] * (longest - len(prompt))] for prompt in prompts]
        seen = [[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
        with torch.no_grad():
            states = self._model(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(seen, device=self._device),
            ).last_hidden_state
        return [rows[: len(prompt)] for rows, prompt in zip(states.float().cpu(), prompts, strict=True)]
