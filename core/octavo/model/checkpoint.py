"""Checkpoints: tensors by name, whose shapes are known before any of them is read."""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.contract import QuantizedWeight
from octavo.errors import ModelError, UnsupportedError
from octavo.model.names import Part, bias_name, weight_name

__all__ = ["Checkpoint", "SafetensorsCheckpoint", "read_json", "read_json_list"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NUMBERED = re.compile(r"(.+)-\d+-of-(\d{1,5})\.safetensors")
FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint(ABC):
    """The tensors of a model in its files.

    Attributes:
        where: the file or folder, for messages.
        shapes: tensor name to shape, of every tensor.
        rows_first: tensors that are outputs by inputs here, also where the family's own files have them transposed.

    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    rows_first: Collection[str] = ()

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

    def packed_format(self, name: str) -> str | None:
        """The format among `WEIGHT_FORMATS` whose codes and scales `read_packed` yields; None where it is none."""
        return None

    def read_packed(self, name: str) -> QuantizedWeight:
        """A tensor that has a packed format, as it is stored: its last axis is K, those before it are rows."""
        raise UnsupportedError(f"{self.where}: tensor {name} is not packed")

    def weight(self, part: Part) -> str | None:
        """The name of the tensor that a part of a table's entry stands for."""
        return weight_name(part.name, self.shapes)

    def bias(self, part: Part) -> str | None:
        """The name of its bias."""
        return bias_name(part.name, self.shapes)


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors files of a folder, memory-mapped. Layouts that are read:

    - `model.safetensors.index.json`, whose weight_map says which file holds which tensor;
    - `model.safetensors`;
    - one index of another name;
    - whatever `*.safetensors` there are, the sets named `NAME-00001-of-0000N.safetensors` complete, no tensor in two
      of them. `consolidated*.safetensors` are left aside where there are others: they hold the same under other names.

    Attributes:
        types: tensor name to element type, as the format spells it ("BF16").

    """

    def __init__(self, folder: Path) -> None:
        """Read the headers, which also checks that no file is cut short.

        Raises:
            ModelError: no file, a missing or broken one, or files that contradict each other.

        """
        self.where = str(folder)
        index = _index(folder)
        weight_map = _weight_map(index) if index else {}
        files = sorted(set(weight_map.values())) if index else _files(folder)
        missing = [file for file in files if not (folder / file).is_file()]
        if index and missing:
            raise ModelError(f"{folder} lacks {missing[0]}, one of the {len(files)} files that {index.name} lists")
        self._home: dict[str, Any] = {}
        homes: dict[str, str] = {}
        for file in files:
            opened = _open(folder / file)
            for name in opened.keys():  # noqa: SIM118
                if weight_map.get(name, file) != file:
                    continue
                if name in homes:
                    raise ModelError(f"{folder}: tensor {name} is both in {homes[name]} and in {file}")
                self._home[name], homes[name] = opened, file
        lost = sorted(set(weight_map) - set(homes))
        if index and lost:
            raise ModelError(
                f"{folder}: {weight_map[lost[0]]} lacks tensor {lost[0]}, which {index.name} says it holds"
            )
        slices = {name: file.get_slice(name) for name, file in self._home.items()}
        self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        self.types: Mapping[str, str] = {name: str(part.get_dtype()) for name, part in slices.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The float type of most of its numbers."""
        return self.dtype_of(self.shapes)

    def dtype_of(self, names: Collection[str]) -> torch.dtype:
        """The float type of most of the numbers of these tensors; float32 where none is of a float type."""
        sizes: Counter[str] = Counter()
        for name in names:
            if self.types[name] in FLOAT_TYPES:
                sizes[self.types[name]] += prod(self.shapes[name])
        return FLOAT_TYPES[sizes.most_common(1)[0][0]] if sizes else torch.float32

    def check_readable(self, name: str) -> None:
        """Float types only."""
        if self.types[name] not in FLOAT_TYPES:
            raise UnsupportedError(
                f"{self.where}: tensor {name} is stored as {self.types[name]}, read are {', '.join(FLOAT_TYPES)}"
            )

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file, in the stored type."""
        try:
            tensor: torch.Tensor = self._home[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.where}: tensor {name} cannot be read: {error}") from error
        return tensor


def _index(folder: Path) -> Path | None:
    if (folder / INDEX).is_file():
        return folder / INDEX
    if (folder / SINGLE).is_file():
        return None
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) > 1:
        raise ModelError(f"{folder} has {others[0].name} and {others[1].name}: rename the one that is meant to {INDEX}")
    return others[0] if others else None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} lists no files: it needs a weight_map from names of tensors to names of files")
    return weight_map


def _files(folder: Path) -> list[str]:
    """Names of the files that make up a checkpoint without an index."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern))
        hint = f"; it has {others[0]}, which is not read from a folder" if others else ""
        raise ModelError(f"folder {folder} has no .safetensors file{hint}; --load-format dummy makes random weights")
    files = [file for file in files if not file.startswith("consolidated")] or files
    for stem, last in sorted({found.group(1, 2) for file in files if (found := NUMBERED.fullmatch(file))}):
        whole = [f"{stem}-{i:0{len(last)}}-of-{last}.safetensors" for i in range(1, int(last) + 1)]
        missing = [file for file in whole if file not in files]
        if missing:
            raise ModelError(f"{folder} lacks {missing[0]}, one of the {len(whole)} files of its set")
    return files


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
    content = _json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object, it holds {type(content).__name__}")
    return content


def read_json_list(path: Path) -> list[Any]:
    """The array in a JSON file.

    Raises:
        ModelError: unreadable, not JSON, or no array.

    """
    content = _json(path)
    if not isinstance(content, list):
        raise ModelError(f"{path} must hold an array, it holds {type(content).__name__}")
    return content


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # bad JSON and bad UTF-8
        raise ModelError(f"{path} is not JSON: {error}") from error
