"""What a GGUF file says, without loading it: metadata, tensor table and a view of each tensor's bytes.

The file is mapped, not read. Opening walks its header once (a long vocabulary costs tens of milliseconds) and
decodes a value when it is asked for. A header is somebody else's data: every count, length and offset is checked
against the size of the file before it is used, and whatever is wrong ends in one line of `ModelError`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.errors import ModelError, UnsupportedError

__all__ = ["GGUFFile", "Metadata", "TensorInfo"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NAME_BYTES = 65535

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: as the file spells it, such as "blk.0.attn_q.weight".
        shape: rows first, as torch and numpy have it (the file itself lists the fastest dimension first).
        type: how the elements are stored.
        offset: of its first byte, from the beginning of the file.
        num_bytes: that it takes.

    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class _Place:
    """Where a value lies: its type, its element type and count if it is an array, and its first byte."""

    type: int
    item_type: int
    num_items: int
    offset: int


class Metadata(Mapping[str, Any]):
    """Key to value as plain Python data (int, float, bool, str, or a list of them), decoded at each access.

    Text that is no UTF-8 has U+FFFD in place of the bad bytes.
    """

    def __init__(self, buffer: mmap.mmap, places: Mapping[str, _Place]) -> None:
        self._buffer = buffer
        self._places = places

    def __getitem__(self, key: str) -> Any:
        place = self._places[key]
        if place.type == _STRING:
            return self._strings(place.offset, 1)[0]
        if place.type != _ARRAY:
            return np.frombuffer(self._buffer, _SCALARS[place.type], 1, place.offset)[0].item()
        if place.item_type == _STRING:
            return self._strings(place.offset, place.num_items)
        return np.frombuffer(self._buffer, _SCALARS[place.item_type], place.num_items, place.offset).tolist()

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def num_items(self, key: str) -> int:
        """Length of an array, without decoding it; 1 for anything else."""
        place = self._places[key]
        return place.num_items if place.type == _ARRAY else 1

    def _strings(self, offset: int, count: int) -> list[str]:
        buffer, length_at = self._buffer, _U64.unpack_from
        texts = []
        for _ in range(count):
            begin = offset + 8
            offset = begin + length_at(buffer, offset)[0]
            texts.append(buffer[begin:offset].decode("utf-8", "replace"))
        return texts


class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: of the file.
        metadata: everything it says of the model.
        tensors: name to place, in the order of the file.

    Raises:
        ModelError: the file cannot be read, or is no sound GGUF file.
        UnsupportedError: it is one of a kind that is not read (big-endian, version 1).

    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            reason = getattr(error, "strerror", None) or error
            raise ModelError(f"{self.path}: cannot be read as a GGUF file: {reason}") from error
        header = _Header(self.path, self._buffer)
        self.metadata = Metadata(self._buffer, header.places)
        self.tensors: Mapping[str, TensorInfo] = header.tensors

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor: uint8 [num_bytes], a read-only view of the mapped file."""
        info = self.tensors[name]
        return np.frombuffer(self._buffer, np.uint8, info.num_bytes, info.offset)


class _Header:
    """One walk over the header. `places` and `tensors` are complete once it is made."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._size = len(buffer)
        self._at = 0
        self.places: dict[str, _Place] = {}
        self.tensors: dict[str, TensorInfo] = {}

        if self._size < 4 or buffer[:4] != _MAGIC:
            raise ModelError(f"{path}: not a GGUF file: it begins with {bytes(buffer[:4])!r}, not {_MAGIC!r}")
        self._at = 4
        self._check_version(self._u32("the version"))
        num_tensors = self._u64("the number of tensors")
        num_values = self._u64("the number of metadata values")
        self._check_fits(num_values, 13, "metadata values")  # a length, a type and one byte of value
        self._check_fits(num_tensors, 24, "tensors")  # a length, a rank, a type and an offset
        for _ in range(num_values):
            self._read_value()
        raw = [self._read_tensor() for _ in range(num_tensors)]
        self._place_tensors(raw)

    def _fail(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: broken GGUF file: {what}; fetch or convert it again")

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise UnsupportedError(f"{self._path}: a big-endian GGUF file; only little-endian ones are read")
        raise UnsupportedError(
            f"{self._path}: GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are read"
        )

    def _check_fits(self, count: int, num_bytes_each: int, what: str) -> None:
        if count * num_bytes_each > self._size - self._at:
            raise self._fail(f"{count} {what} at byte {self._at} cannot fit its {self._size} bytes")

    def _take(self, num_bytes: int, what: str) -> int:
        """Step over bytes that must be there; returns where they begin."""
        begin = self._at
        if num_bytes > self._size - begin:
            raise self._fail(f"{what} at byte {begin} takes {num_bytes} bytes, past its end at {self._size}")
        self._at = begin + num_bytes
        return begin

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._buffer, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._buffer, self._take(8, what))[0]
        return value

    def _name(self, what: str) -> str:
        num_bytes = self._u64(what)
        if num_bytes > _MAX_NAME_BYTES:
            raise self._fail(f"{what} at byte {self._at - 8} is {num_bytes} bytes long, over {_MAX_NAME_BYTES}")
        begin = self._take(num_bytes, what)
        try:
            return self._buffer[begin : self._at].decode()
        except UnicodeDecodeError:
            raise self._fail(f"{what} at byte {begin} is no UTF-8") from None

    def _read_value(self) -> None:
        key = self._name("a metadata key")
        if key in self.places:
            raise self._fail(f"metadata {key!r:.100} stands in it twice")
        what = f"metadata {key!r:.100}"
        value_type = self._u32(what)
        item_type, num_items = 0, 0
        if value_type == _ARRAY:
            item_type, num_items = self._u32(what), self._u64(what)
        offset = self._at
        if _STRING in (value_type, item_type):
            self._skip_strings(1 if value_type == _STRING else num_items, what)
        else:
            dtype = _SCALARS.get(item_type if value_type == _ARRAY else value_type)
            if dtype is None:  # no known writer makes an array of arrays
                raise self._fail(f"{what} has the unknown type {value_type}/{item_type}")
            self._take(dtype.itemsize * (num_items if value_type == _ARRAY else 1), what)
        self.places[key] = _Place(value_type, item_type, num_items, offset)

    def _skip_strings(self, count: int, what: str) -> None:
        """Step over strings; a vocabulary and its merges are most of a header, hence the bare loop."""
        self._check_fits(count, 8, f"strings of {what}")
        buffer, length_at, at, last = self._buffer, _U64.unpack_from, self._at, self._size - 8
        for _ in range(count):
            if at > last:
                raise self._fail(f"the strings of {what} run past its end at {self._size}")
            at += 8 + length_at(buffer, at)[0]
        if at > self._size:
            raise self._fail(f"the strings of {what} run past its end at {self._size}")
        self._at = at

    def _read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a tensor's name")
        what = f"tensor {name!r:.100}"
        num_dims = self._u32(what)
        if num_dims > _MAX_DIMS:
            raise self._fail(f"{what} has {num_dims} dimensions, over {_MAX_DIMS}")
        shape = tuple(self._u64(what) for _ in range(num_dims))[::-1]
        return name, shape, self._u32(what), self._u64(what)

    def _place_tensors(self, raw: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        """Turn offsets from the data's begin, which is known only now, into offsets from the file's."""
        alignment = 32
        if "general.alignment" in self.places:
            alignment = Metadata(self._buffer, self.places)["general.alignment"]
            if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
                raise self._fail(f"general.alignment is {alignment!r:.40}, not a power of two")
        data = -(-self._at // alignment) * alignment
        for name, shape, type_number, offset in raw:
            what = f"tensor {name!r:.100}"
            if name in self.tensors:
                raise self._fail(f"{what} stands in it twice")
            try:
                kind = GGMLQuantizationType(type_number)
            except ValueError:
                raise UnsupportedError(f"{self._path}: {what} is stored in the unknown type {type_number}") from None
            num_bytes = self._num_bytes(shape, kind, what)
            if offset % alignment:
                raise self._fail(f"{what} begins at {offset}, not a multiple of {alignment}")
            if data + offset + num_bytes > self._size:
                raise self._fail(f"{what} ends at byte {data + offset + num_bytes}, past its end at {self._size}")
            self.tensors[name] = TensorInfo(name, shape, kind, data + offset, num_bytes)

    def _num_bytes(self, shape: tuple[int, ...], kind: GGMLQuantizationType, what: str) -> int:
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        row = shape[-1] if shape else 1
        if row % block_elements:
            raise self._fail(f"{what} has rows of {row} in {kind.name}, which holds {block_elements} at a time")
        return prod(shape) // block_elements * block_bytes
