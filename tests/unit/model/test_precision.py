"""Quantised weights in a model: which slots are, and a program on them gives what the dequantised ones give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from doubles.family_cases import CASES
from doubles.paged_program import Paged
from doubles.tiny_models import Tiny, base, folder_files, gguf_files
from gguf.constants import GGMLQuantizationType

from octavo.contract import QuantizedWeight, Weight
from octavo.gguf_file import GGUFFile
from octavo.model.describe import describe_native, load_weights
from octavo.model.gguf import GGUFCheckpoint
from octavo.model.precision import DENSE, Precision, told_weights
from octavo.model.quantize import quantize
from octavo.model.slots import slots

from .converter import Conversion, write_gguf

CPU = torch.device("cpu")
BOTH = ("int8", "int4")
TEXT = list(range(3, 40))
LLAMA = Conversion("LLAMA", permuted=True)
FLOATS = ("norm", "router", "correction", "sinks", "kv_b", "positions", "shared.gate", ".bias", "attn_p", "mlp_p")


def load(description: Any, precision: Precision, seed: int | None = None) -> dict[str, Weight]:
    return load_weights(
        description, dtype=torch.float32, device=CPU, progress=False, precision=precision, seed_dummy=seed
    )


def dequantized(description: Any, weights: dict[str, Weight]) -> dict[str, Weight]:
    """The same numbers, dense, in the shapes that slots have."""
    shapes = {slot.name: slot.shape for slot in slots(description.spec)}
    return {
        name: weight.dequantize().view(shapes[name]) if isinstance(weight, QuantizedWeight) else weight
        for name, weight in weights.items()
    }


def check_program(description: Any, weights: dict[str, Weight]) -> None:
    """The generic program's logits are those of the dequantised weights."""
    found = Paged(description, weights=weights).whole(TEXT)
    expected = Paged(description, weights=dequantized(description, weights)).whole(TEXT)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "case", ["llama-rope-llama3-tied", "llama-biases-head-dim", "gpt_neox", "gpt2", "opt", "qwen2_moe", "gpt_oss"]
)
@pytest.mark.parametrize("quantization", BOTH)
def test_a_family_in_small_weights(case: str, quantization: Any, tmp_path: Path) -> None:
    """Parts that are stacked, split, transposed or reordered come to the rows that the dense slot has."""
    CASES[case].save(tmp_path)
    description = describe_native(folder_files(tmp_path), 64)
    dense, weights = load(description, DENSE), load(description, Precision(quantization, BOTH))
    assert list(weights) == list(dense)
    for name, weight in dequantized(description, weights).items():
        assert isinstance(weight, torch.Tensor)
        off = float((weight - dense[name]).norm() / dense[name].norm())  # type: ignore[operator]
        small = isinstance(weights[name], QuantizedWeight)
        assert small != any(part in name for part in FLOATS), name
        wide = not name.startswith("layers") or name.endswith(("mlp.down", "shared.down"))
        assert off < ((0.01 if wide or quantization == "int8" else 0.12) if small else 1e-9), name
    check_program(description, weights)


def test_latent_attention_in_small_weights(tmp_path: Path) -> None:
    CASES["deepseek_v3-yarn"].save(tmp_path)
    description = describe_native(folder_files(tmp_path), 64)
    check_program(description, load(description, Precision("int8", BOTH)))


def test_dummy_weights_are_quantised_too(tmp_path: Path) -> None:
    Tiny("Llama", base()).save(tmp_path)
    description = describe_native(folder_files(tmp_path), 64)
    dense, small = load(description, DENSE, seed=3), load(description, Precision("int8", BOTH), seed=3)
    expected = quantize(dense["head"], "int8")  # type: ignore[arg-type]
    found = small["head"]
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.codes, expected.codes)
    assert told_weights(small) == "int8: 18"


# ---- GGUF files


def store(source: Path, target: Path, kinds: dict[str, str]) -> None:
    """A GGUF file again, with tensors whose names hold a key stored in the type that goes with it."""
    file = GGUFFile(source)
    checkpoint = GGUFCheckpoint(file)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, file.metadata["general.architecture"])
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for name in file.tensors:
        values = checkpoint.read(name).numpy()
        chosen = next((kind for key, kind in kinds.items() if key in name and values.ndim > 1), "F32")
        kind = GGMLQuantizationType[chosen]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A Llama as a GGUF file of float32, with queries and keys permuted."""
    Tiny("Llama", base(tie_word_embeddings=True)).save(tmp_path)
    write_gguf(tmp_path, tmp_path / "float.gguf", LLAMA)
    return tmp_path / "float.gguf"


def forms(weights: dict[str, Weight]) -> dict[str, str]:
    """Of the first layer's matrices and the embedding."""
    names = ("embedding", "layers.0.attn.qkv", "layers.0.attn.o", "layers.0.mlp.up", "layers.0.mlp.down")
    return {name.removeprefix("layers.0."): told_weights({name: weights[name]}).removesuffix(": 1") for name in names}


ALL_SORTS = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q4_0",
    "attn_output": "Q5_0",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q8_0",
    "ffn_down": "F16",
}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_packed_matrices_pass_through_without_loss(kind: str, written: Path, tmp_path: Path) -> None:
    path = tmp_path / "packed.gguf"
    store(written, path, dict.fromkeys(ALL_SORTS, kind))
    description = describe_native(gguf_files(path), 64)
    dense, weights = load(description, DENSE), load(description, Precision("auto", BOTH))
    form = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4 with mins"}[kind]
    assert set(forms(weights).values()) == {form}
    for name, weight in dequantized(description, weights).items():
        assert torch.equal(weight, dense[name]), name  # type: ignore[arg-type]
    check_program(description, weights)


@pytest.mark.parametrize(
    ("quantization", "formats", "expected"),
    [
        ("auto", BOTH, ("int8", "int4 with mins", "float32", "int8", "float32")),
        ("auto", ("int8",), ("int8", "float32", "float32", "float32", "float32")),
        ("auto", (), ("float32",) * 5),
        ("none", BOTH, ("float32",) * 5),
        ("int8", BOTH, ("int8", "int4 with mins", "int8", "int8", "int8")),
        ("int8", ("int8",), ("int8",) * 5),
        ("int4", BOTH, ("int8", "int4 with mins", "int4 with mins", "int4 with mins", "int8")),
    ],
)
def test_files_of_all_sorts(
    quantization: Any, formats: tuple[str, ...], expected: tuple[str, ...], written: Path, tmp_path: Path
) -> None:
    """What is packed stays so where it can; a slot of parts that differ takes a form with room for all, or none."""
    path = tmp_path / "packed.gguf"
    store(written, path, ALL_SORTS)
    description = describe_native(gguf_files(path), 64)
    dense, weights = load(description, DENSE), load(description, Precision(quantization, formats))
    assert tuple(forms(weights).values()) == expected
    for name, weight in dequantized(description, weights).items():
        off = float((weight - dense[name]).norm() / dense[name].norm())  # type: ignore[operator]
        assert off < 0.1, name
    check_program(description, weights)


def test_parts_without_a_form_in_common(written: Path, tmp_path: Path) -> None:
    """Mins beside 8 bits: dense where nothing was asked for, and 8 bits where they were."""
    path = tmp_path / "packed.gguf"
    store(written, path, {"ffn_gate": "Q4_1", "ffn_up": "Q8_0"})
    description = describe_native(gguf_files(path), 64)
    assert forms(load(description, Precision("auto", BOTH)))["mlp.up"] == "float32"
    small = load(description, Precision("int8", BOTH))
    assert forms(small)["mlp.up"] == "int8"
    check_program(description, small)


def test_a_precision_is_a_value() -> None:
    assert Precision("int8", BOTH) == replace(Precision("int4", BOTH), quantization="int8")
    assert DENSE.made("layer") is None
    assert [Precision("int4", BOTH).made(role) for role in ("layer", "down", "table")] == ["int4", "int8", "int8"]
