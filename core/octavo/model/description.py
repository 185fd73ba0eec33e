"""What is known of a model before its weights are read: facts that everybody needs, and what its program needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.contract import Attention, DecoderSpec
from octavo.model.files import ModelFiles
from octavo.model.names import NameTable

__all__ = ["HfLayer", "HfModel", "ModelDescription", "NativeModel"]


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What any program's model tells of itself.

    Attributes:
        files: where it lies.
        architecture: its model type ("llama").
        vocab_size: logits of a token, padding included.
        max_position: positions that it was made for.
        eos_token_ids: each of them ends a sequence.
        bos_token_id: begins one, or None.
        sampling_defaults: the model's own sampling parameters (temperature, top_k, top_p, min_p,
            repetition_penalty), those that it has.
        dtype: the checkpoint's; for quantised ones what to compute in.
        num_parameters: numbers in its checkpoint, or None where there are no weights (dummy ones can be made).
        embeds_as: what it is where it can only embed ("an encoder"); empty where it generates.

    """

    files: ModelFiles
    architecture: str
    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    sampling_defaults: Mapping[str, Any]
    dtype: torch.dtype
    num_parameters: int | None
    embeds_as: str = ""


@dataclass(frozen=True, kw_only=True)
class NativeModel(ModelDescription):
    """A model of a family: data that the generic program runs, or a platform's own.

    Attributes:
        spec: the decoder.
        names: what its checkpoint calls the weights.
        quantization: its folder's quantization_config, see `formats`; None where its weights are dense.

    """

    spec: DecoderSpec
    names: NameTable
    quantization: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class HfLayer:
    """One attention layer of a transformers model.

    Attributes:
        module: its name within the model.
        attention: its geometry, as paged attention sees it.
        query_size: dims of a query and a key, at most `attention.head_size`; the rest is filled with zeros.
        value_size: dims of a value, likewise.

    """

    module: str
    attention: Attention
    query_size: int
    value_size: int


@dataclass(frozen=True, kw_only=True)
class HfModel(ModelDescription):
    """A model whose layers transformers runs, with paged attention put in.

    Attributes:
        class_name: transformers' class.
        layers: its attention layers in the order in which they run.
        body: name of the module that gives final hidden states.
        width: numbers a token that its widest product yields, the head's aside.

    """

    class_name: str
    layers: tuple[HfLayer, ...]
    body: str
    width: int
