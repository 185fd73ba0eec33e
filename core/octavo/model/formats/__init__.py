"""Checkpoints of packed weights, read as if they were dense: from config.json's quantization_config to a checkpoint.

Each format is a class that finds its packed tensors among those of the files, checks them by name, type and shape
before anything is read, and makes a dense tensor of each. So whatever runs dense weights runs these. Which modules
are packed the tensors themselves say, so lists such as modules_to_not_convert are not needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import UnsupportedError, shown
from octavo.model.checkpoint import Checkpoint, SafetensorsCheckpoint
from octavo.model.formats.awq import Awq
from octavo.model.formats.base import PackedCheckpoint, Quantization, WeightFormat
from octavo.model.formats.compressed import compressed_tensors
from octavo.model.formats.gptq import Gptq
from octavo.model.formats.mxfp4 import Mxfp4
from octavo.model.formats.scaled import Scaled

__all__ = ["open_folder", "weight_format"]

# quant_method of a quantization_config -> from the rest of it to the format.
METHODS = {
    "awq": Awq.of,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": Scaled.of,
    "fp8": Scaled.of,
    "gptq": Gptq.of,
    "mxfp4": Mxfp4.of,
}


def weight_format(quantization: Mapping[str, Any], where: str) -> WeightFormat:
    """The format that a quantization_config describes.

    Args:
        quantization: the object in config.json.
        where: the file, for messages.

    Raises:
        UnsupportedError: a method, or a variant of one, that is not read; one line with what is.
        ModelError: a value has another kind than it must have.

    """
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        named = "an unnamed method" if method is None else shown(method)
        raise UnsupportedError(
            f"{where}: weights quantised by {named}; read are {', '.join(METHODS)}, "
            "weights in float32, float16 and bfloat16, and GGUF files"
        )
    return METHODS[method](Quantization(quantization, where))


def open_folder(folder: Path, quantization: Mapping[str, Any] | None) -> Checkpoint:
    """The checkpoint in a folder, dense.

    Args:
        folder: with safetensors files.
        quantization: the config's quantization_config; None where it has none.

    Raises:
        UnsupportedError: see `weight_format`.
        ModelError: the files are missing or broken, or are not what the config says.

    """
    stored = SafetensorsCheckpoint(folder)
    if quantization is None:
        return stored
    return PackedCheckpoint(stored, weight_format(quantization, f"{folder / 'config.json'}"))
