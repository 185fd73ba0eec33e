"""What a weight format is, and a checkpoint seen through one."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from octavo.errors import ModelError, UnsupportedError, shown
from octavo.model.checkpoint import Checkpoint, SafetensorsCheckpoint

__all__ = ["Packed", "PackedCheckpoint", "Quantization", "WeightFormat"]

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """A dense tensor that can be made.

    Attributes:
        name: of it.
        shape: of it, outputs by inputs; experts, where one tensor holds them all, before.
        parts: role to name of the stored tensors that it is made from.

    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]


class WeightFormat(ABC):
    """One way to pack the weights of linear layers. As text it says what people call it, with its settings.

    Attributes:
        unused: how names of tensors end that only a run in low precision needs, such as scales of activations.

    """

    unused: tuple[str, ...] = ()

    @abstractmethod
    def find(self, stored: SafetensorsCheckpoint) -> Iterator[Packed]:
        """Every packed tensor of the files, from names, types and shapes.

        Raises:
            ModelError: one lacks a part, or parts do not fit each other.

        """

    @abstractmethod
    def read(self, packed: Packed, stored: SafetensorsCheckpoint) -> torch.Tensor:
        """The dense tensor, in a float type that holds its values."""

    def part(
        self,
        stored: SafetensorsCheckpoint,
        name: str,
        beside: str,
        types: Collection[str],
        shapes: Collection[tuple[int, ...]] | None = None,
    ) -> str:
        """The name, if the checkpoint has such a tensor.

        Args:
            stored: the checkpoint.
            name: of a tensor that something packed needs.
            beside: the tensor that needs it, for messages.
            types: that it may be stored in.
            shapes: that it may have; None for any.

        Raises:
            ModelError: it is not there, or of another type or shape.

        """
        if name not in stored.shapes:
            raise ModelError(f"{stored.where}: tensor {name} is missing, which {beside} needs")
        if stored.types[name] not in types:
            raise ModelError(
                f"{stored.where}: tensor {name} is stored as {stored.types[name]}, "
                f"expected is {' or '.join(types)} to fit {beside}"
            )
        if shapes is not None and stored.shapes[name] not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(
                f"{stored.where}: tensor {name} has shape {list(stored.shapes[name])}, "
                f"expected is {allowed} to fit {beside} {list(stored.shapes[beside])} ({self})"
            )
        return name


class PackedCheckpoint(Checkpoint):
    """The dense tensors that a checkpoint has, and those that a format makes of the others."""

    def __init__(self, stored: SafetensorsCheckpoint, form: WeightFormat) -> None:
        """Find what is packed.

        Raises:
            ModelError: nothing is, or what is lacks a part or does not fit.

        """
        self.where = stored.where
        self._stored = stored
        self._form = form
        self._packed = {packed.name: packed for packed in form.find(stored)}
        if not self._packed:
            raise ModelError(
                f"{stored.where}: its config says that weights are quantised ({form}), but none of its "
                f"{len(stored.shapes)} tensors is; if they are dense, remove quantization_config from config.json"
            )
        used = {name for packed in self._packed.values() for name in packed.parts.values()}
        dense = {n: s for n, s in stored.shapes.items() if n not in used and not n.endswith(form.unused)}
        twice = sorted(dense.keys() & self._packed.keys())
        if twice:
            parts = ", ".join(self._packed[twice[0]].parts.values())
            raise ModelError(f"{stored.where}: {twice[0]} is there both dense and packed ({parts})")
        self.shapes = dense | {name: packed.shape for name, packed in self._packed.items()}
        self.rows_first = self._packed.keys()
        self._dense = dense.keys()

    @property
    def dtype(self) -> torch.dtype:
        """The float type of most of what is not packed."""
        return self._stored.dtype_of(self._dense)

    def check_readable(self, name: str) -> None:
        """What is packed was checked when it was found."""
        if name not in self._packed:
            self._stored.check_readable(name)

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file, or what the format makes."""
        packed = self._packed.get(name)
        return self._form.read(packed, self._stored) if packed else self._stored.read(name)


class Quantization:
    """A quantization_config, checked as it is read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.method = str(values.get("quant_method"))
        self._values = values

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self._values.get(key)

    def choice(self, key: str, allowed: Collection[T], default: T) -> T:
        """The value of `key`, `default` if it is absent or null.

        Raises:
            UnsupportedError: it is none of `allowed`.

        """
        value = self._values.get(key)
        if value is None:
            return default
        for one in allowed:
            if type(value) is type(one) and value == one:
                return one
        raise self.unsupported(f"{key} {shown(value)}", ", ".join(map(repr, allowed)))

    def integers(self, key: str, count: int) -> tuple[int, ...] | None:
        """The value of `key`, so many positive integers; None if it is absent or null.

        Raises:
            ModelError: it is anything else.

        """
        value = self._values.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if len(values) != count or not all(type(n) is int and n > 0 for n in values):
            wanted = "a positive integer" if count == 1 else f"a list of {count} positive integers"
            raise ModelError(f"{self.where}: {key} of the quantization_config must be {wanted}, it is {shown(value)}")
        return tuple(values)

    def group_size(self, key: str = "group_size", default: int | None = None) -> int | None:
        """How many inputs share a scale; None for all of them, which files spell -1.

        Raises:
            ModelError: it is neither -1 nor a positive integer.

        """
        value = self._values.get(key)
        if value == -1 or (value is None and default is None):
            return None
        found = self.integers(key, 1)
        return found[0] if found else default

    def unsupported(self, found: str, read: str) -> UnsupportedError:
        """The error for what is not read."""
        return UnsupportedError(f"{self.where}: weights quantised by {self.method} with {found}; read are {read}")
