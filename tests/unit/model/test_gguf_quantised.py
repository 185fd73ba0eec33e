"""A GGUF model whose matrices are stored in every type that files mix gives the logits of its dense twin."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from doubles.paged_program import Paged
from doubles.tiny_models import Tiny, base, gguf_files
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.model.describe import describe_model, load_weights

from .harness import compare

SIZE = 256  # of rows: what the largest blocks hold
# Where the float16 numbers of a block lie, which all its values are in proportion to (ggml-common.h).
FACTORS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(num_rows: int, kind: GGMLQuantizationType, seed: int) -> npt.NDArray[np.uint8]:
    """Rows of random blocks whose values are as large as a layer's weights."""
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (num_rows * SIZE // elements, num_bytes), dtype=np.uint8)

    def set_factors(value: float) -> npt.NDArray[np.uint8]:
        for at in FACTORS[kind.name]:
            blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        return blocks.reshape(num_rows, -1)

    spread = float(gguf.quants.dequantize(set_factors(1.0), kind).std())
    return set_factors(SIZE**-0.5 / spread)


def write(model: Any, path: Path) -> None:
    """The model's own norms and biases, and matrices of random blocks, which the model gets too."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    kinds = [GGMLQuantizationType[name] for name in FACTORS]
    matrices = 0
    for name, parameter in model.named_parameters():
        target = names.get_name(name, (".weight", ".bias"))
        if parameter.ndim == 1:
            writer.add_tensor(target, parameter.detach().numpy())
            continue
        kind = kinds[matrices % len(kinds)]
        raw = random_blocks(parameter.shape[0], kind, matrices)
        writer.add_tensor(target, raw, raw_dtype=kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
        matrices += 1
    assert matrices >= len(kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_of_mixed_types(tmp_path: Path) -> None:
    sizes = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_hidden_layers": 2, "num_key_value_heads": 4}
    model = Tiny("Qwen2", base(**sizes)).make()
    path = tmp_path / "mixed.gguf"
    write(model, path)
    description = describe_model(gguf_files(path), 64)
    weights = load_weights(description, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    assert torch.equal(weights["layers.1.mlp.down"], model.model.layers[1].mlp.down_proj.weight)
    assert torch.equal(weights["head"], model.lm_head.weight)
    assert description.dtype == torch.bfloat16  # what quantised weights compute in unless told
    compare(Paged(description, weights=weights), model)
