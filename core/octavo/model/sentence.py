"""What the files of an embedding model say about the way from hidden states to a text's vector.

Folders follow sentence-transformers: modules.json lists the steps, each with a config in a folder of its own.
"""

from pathlib import Path
from typing import Any

from octavo.errors import ModelError, UnsupportedError, shown
from octavo.gguf_file import GGUFFile
from octavo.model.checkpoint import read_json, read_json_list
from octavo.model.files import ModelFiles
from octavo.pooling_params import Pooling

__all__ = ["max_seq_length", "own_pooling"]

# Their names for a pooling -> ours; the older spelling has a flag for each.
POOLINGS: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
FLAGS: dict[str, str] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
GGUF_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
KNOWN_STEPS = ("Transformer", "Pooling", "Normalize")


def own_pooling(files: ModelFiles) -> Pooling | None:
    """The pooling that a model was trained for, None where its files are silent.

    Raises:
        UnsupportedError: a pooling, or a step after it, that is not known.

    """
    if files.kind == "gguf":
        return _of_gguf(files.path)
    path = files.path / "modules.json"
    if not path.is_file():
        return None
    pooling: Pooling | None = None
    for step in read_json_list(path):
        kind = str(step.get("type")).rpartition(".")[2] if isinstance(step, dict) else shown(step)
        if kind not in KNOWN_STEPS:
            raise UnsupportedError(
                f"{path}: a step of type {kind} makes the embedding; known are {', '.join(KNOWN_STEPS)}"
            )
        if kind == "Pooling":
            pooling = _of_step(files.path / str(step.get("path")) / "config.json")
    return pooling


def max_seq_length(folder: Path) -> int | None:
    """Tokens of the longest text that an embedding model was made for, where its files say so.

    Raises:
        ModelError: it is no positive integer.

    """
    path = folder / "sentence_bert_config.json"
    length: Any = read_json(path).get("max_seq_length") if path.is_file() else None
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ModelError(f"{path}: max_seq_length must be a positive integer, it is {shown(length)}")
    return length


def _of_step(path: Path) -> Pooling:
    config = read_json(path)
    mode = config.get("pooling_mode")
    named = [str(mode)] if mode else [name for flag, name in FLAGS.items() if config.get(flag)]
    if len(named) != 1 or named[0] not in POOLINGS:
        raise UnsupportedError(
            f"{path}: pooling by {' and '.join(named) or 'nothing'}; known are {', '.join(POOLINGS)}"
        )
    return POOLINGS[named[0]]


def _of_gguf(path: Path) -> Pooling | None:
    metadata = GGUFFile(path).metadata
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if number not in GGUF_POOLINGS:
        raise UnsupportedError(f"{path}: pooling_type {shown(number)}; known are {', '.join(map(str, GGUF_POOLINGS))}")
    return GGUF_POOLINGS[number]
