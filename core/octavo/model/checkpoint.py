"""Checkpoints: tensors by name, whose shapes are known before any of them is read."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import ModelError, UnsupportedError
from octavo.model.names import Part, bias_name, weight_name

__all__ = ["Checkpoint", "SafetensorsCheckpoint", "read_json"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint(ABC):
    """The tensors of a model in its files.

    Attributes:
        where: the file or folder, for messages.
        shapes: tensor name to shape, of every tensor.

    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What most of the checkpoint is stored in; where that is no float type, what to compute in."""

    @abstractmethod
    def check_readable(self, name: str) -> None:
        """Whether `read` can serve the tensor.

        Raises:
            UnsupportedError: its type is none that is read; one line.

        """

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor in host memory, in a float dtype, maybe mapped from the file: not to be written to."""

    def weight(self, part: Part) -> str | None:
        """The name of the tensor that a part of a table's entry stands for."""
        return weight_name(part.name, self.shapes)

    def bias(self, part: Part) -> str | None:
        """The name of its bias."""
        return bias_name(part.name, self.shapes)


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors files of a folder, single or sharded, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Read the headers, which also checks that no file is cut short.

        Raises:
            ModelError: no file, a missing shard, or a broken one.

        """
        self.where = str(folder)
        self._files = {path: _open(path) for path in _shards(folder)}
        self._home = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        slices = {name: file.get_slice(name) for name, file in self._home.items()}
        self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        self._types = {name: str(part.get_dtype()) for name, part in slices.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The float type of most of its tensors."""
        types = [FLOAT_TYPES[t] for t in self._types.values() if t in FLOAT_TYPES]
        return max(set(types), key=types.count) if types else torch.float32

    def check_readable(self, name: str) -> None:
        """Float types only."""
        if self._types[name] not in FLOAT_TYPES:
            raise UnsupportedError(
                f"{self.where}: tensor {name} is stored as {self._types[name]}, read are {', '.join(FLOAT_TYPES)}"
            )

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file."""
        try:
            tensor: torch.Tensor = self._home[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.where}: tensor {name} cannot be read: {error}") from error
        return tensor


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} lists no files: it needs a weight_map")
        paths = [folder / str(name) for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {missing[0]}, one of the {len(paths)} files that {INDEX} lists")
        return paths
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern))
        hint = f"; it has {others[0]}, which is not read from a folder" if others else ""
        raise ModelError(f"folder {folder} has no .safetensors file{hint}; --load-format dummy makes random weights")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is no sound safetensors file ({error}); fetch it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: unreadable, not JSON, or no object.

    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # bad JSON and bad UTF-8
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object, it holds {type(content).__name__}")
    return content
