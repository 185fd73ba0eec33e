"""GGUF headers: read as written, and refused in one line when broken."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError, UnsupportedError
from octavo.gguf_file import GGUFFile


def write_sample(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.ratio", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.signed", -3)
    writer.add_string("a.text", "naïve 👋")
    writer.add_array("a.texts", ["", "x", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(36, dtype=np.uint8).reshape(2, 18), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_sample(tmp_path_factory.mktemp("gguf") / "sample.gguf").read_bytes()


def opened(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "case.gguf"
    path.write_bytes(data)
    return GGUFFile(path)


def header(*parts: bytes, version: int = 3, num_tensors: int = 0, num_values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_reads_what_was_written(tmp_path: Path) -> None:
    file = GGUFFile(write_sample(tmp_path / "sample.gguf"))
    assert dict(file.metadata) == {
        "general.architecture": "llama",
        "a.count": 7,
        "a.ratio": 0.5,
        "a.flag": True,
        "a.signed": -3,
        "a.text": "naïve 👋",
        "a.texts": ["", "x", "日本"],
        "a.numbers": [1, -2, 3],
    }
    assert file.metadata.num_items("a.texts") == 3
    assert file.metadata.num_items("a.text") == 1
    assert file.metadata["a.flag"] is True
    one, two = file.tensors["one"], file.tensors["two"]
    assert (one.shape, one.type, one.num_bytes) == ((2, 3), GGMLQuantizationType.F32, 24)
    assert (two.shape, two.type, two.num_bytes) == ((2, 32), GGMLQuantizationType.Q4_0, 36)
    assert file.tensor_bytes("one").view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert file.tensor_bytes("two").tolist() == list(range(36))


def test_empty_header_and_empty_values(tmp_path: Path) -> None:
    assert dict(opened(tmp_path, header()).metadata) == {}
    empty_array = text(b"k") + struct.pack("<IIQ", 9, 5, 0)
    assert opened(tmp_path, header(empty_array, num_values=1)).metadata["k"] == []
    empty_text = text(b"k") + struct.pack("<IQ", 8, 0)
    assert opened(tmp_path, header(empty_text, num_values=1)).metadata["k"] == ""


def test_text_that_is_no_utf8_is_replaced(tmp_path: Path) -> None:
    value = text(b"k") + struct.pack("<I", 8) + text(b"a\xffb")
    assert opened(tmp_path, header(value, num_values=1)).metadata["k"] == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cannot be read"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF\x03", "the version"),
        (header(version=1), "version 1"),
        (header(version=99), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(num_values=2**63), "metadata values"),
        (header(num_tensors=2**63), "tensors"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 8, 2**60), num_values=1), "strings"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 4, 2**62), num_values=1), "'k'"),
        (header(text(b"k") + struct.pack("<IQ", 8, 2**64 - 1), num_values=1), "past its end"),
        (header(text(b"k") + struct.pack("<IIQQQ", 9, 8, 2, 8, 0), num_values=1), "past its end"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 9, 0), num_values=1), "unknown type"),
        (header(text(b"k") + struct.pack("<IQ", 77, 0), num_values=1), "unknown type"),
        (header(struct.pack("<Q", 2**64 - 1), bytes(64), num_values=1), "bytes long"),
        (header(text(b"\xff\xfe"), bytes(64), num_values=1), "no UTF-8"),
        (header((text(b"k") + struct.pack("<IQ", 10, 1)) * 2, num_values=2), "twice"),
        (header(text(b"general.alignment") + struct.pack("<II", 4, 3), num_values=1), "power of two"),
        (header(text(b"general.alignment") + struct.pack("<II", 4, 0), num_values=1), "power of two"),
        (header(text(b"general.alignment") + struct.pack("<IQ", 8, 0), num_values=1), "power of two"),
        (header(tensor(b"t", (1,) * 5, 0, 0), num_tensors=1), "5 dimensions"),
        (header(tensor(b"t", (4,), 0, 0), num_tensors=1), "past its end"),
        (header(tensor(b"t", (2**63, 2**63), 0, 0), num_tensors=1), "past its end"),
        (header(tensor(b"t", (1,), 0, 2**64 - 32), num_tensors=1), "past its end"),
        (header(tensor(b"t", (1,), 0, 7), bytes(64), num_tensors=1), "multiple of 32"),
        (header(tensor(b"t", (33,), 2, 0), bytes(64), num_tensors=1), "rows of 33"),
        (header(tensor(b"t", (), 2, 0), bytes(64), num_tensors=1), "rows of 1"),
        (header(tensor(b"t", (1,), 4242, 0), bytes(64), num_tensors=1), "unknown type 4242"),
        (header(tensor(b"t", (1,), 0, 0) * 2, bytes(64), num_tensors=2), "twice"),
    ],
)
def test_broken_or_hostile_files_fail_in_one_line(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, data)
    message = str(caught.value)
    assert says in message
    assert "case.gguf" in message
    assert "\n" not in message
    assert len(message) < 1000


def test_unknown_kinds_are_told_from_broken_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        opened(tmp_path, header(version=1))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            GGUFFile(path)


def test_every_truncation_is_noticed(tmp_path: Path, sample: bytes) -> None:
    for length in range(len(sample) - 32):  # the writer pads the last tensor
        with pytest.raises(ModelError):
            opened(tmp_path, sample[:length])


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 600), value=st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, sample: bytes, at: int, value: int
) -> None:
    data = bytearray(sample)
    data[at % len(data)] = value
    try:
        file = opened(tmp_path_factory.getbasetemp(), bytes(data))
    except ModelError:
        return
    for key in file.metadata:
        assert file.metadata[key] is not None
    for name in file.tensors:
        assert file.tensor_bytes(name).size == file.tensors[name].num_bytes
