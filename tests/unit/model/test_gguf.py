"""GGUF: every type gives the gguf package's values, and the demo model gives transformers' logits."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from doubles.tiny_models import gguf_files
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.gguf_file import GGUFFile
from octavo.model.describe import describe_model, load_weights
from octavo.model.gguf import GGUF_TYPES, GGUFCheckpoint, dequantize

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinite scales, in both codes
@pytest.mark.parametrize("kind", sorted(GGUF_TYPES), ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(1, 256), (3, 512), (2, 5, 256), (1025, 512)], ids=str)
def test_values_are_bit_equal_to_the_packages(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> None:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = shape[-1] // block_elements * block_bytes
    raw = np.random.default_rng(0).integers(0, 256, (*shape[:-1], row_bytes), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, kind)  # random scales: infinities and NaN among them
    found = dequantize(raw.reshape(-1), kind, shape)
    assert found.dtype == np.float32
    assert found.shape == shape
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(1,), (7,), (31,), (33,), (5, 3), (100_003,)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_plain_floats_of_any_size(shape: tuple[int, ...], dtype: type) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    kind = GGMLQuantizationType.F32 if dtype is np.float32 else GGMLQuantizationType.F16
    found = dequantize(values.view(np.uint8).reshape(-1), kind, shape)
    np.testing.assert_array_equal(found, values.astype(np.float32))


def test_the_demo_model_loads_as_it_was_written(demo_file: Path) -> None:
    description = describe_model(gguf_files(demo_file), None)
    assert description.architecture == "llama"
    assert description.dtype == torch.bfloat16
    assert description.max_position == 8192
    assert description.eos_token_ids == frozenset({2})
    assert description.bos_token_id == 1
    assert description.num_parameters == 134_515_008
    assert description.spec.tied_embeddings
    weights = load_weights(description, dtype=torch.float32, device=CPU, progress=False)
    checkpoint = GGUFCheckpoint(GGUFFile(demo_file))
    assert torch.equal(weights["embedding"], checkpoint.read("token_embd.weight"))
    assert torch.equal(weights["layers.7.attn.qkv"][768:], checkpoint.read("blk.7.attn_v.weight"))
    up = torch.cat((checkpoint.read("blk.3.ffn_gate.weight"), checkpoint.read("blk.3.ffn_up.weight")))
    assert torch.equal(weights["layers.3.mlp.up"], up)
    # Row 2 j + half of a head in the file is row half * 32 + j of a head that rotates by halves.
    stored, loaded = checkpoint.read("blk.7.attn_k.weight"), weights["layers.7.attn.qkv"][576:768]
    assert torch.equal(loaded[64 + 32 + 5], stored[64 + 2 * 5 + 1])
    assert torch.equal(loaded[128 + 9], stored[128 + 2 * 9])
