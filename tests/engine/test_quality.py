"""Quality gates of precisions on the demo model, whose float32 in transformers is the truth.

Perplexity is of Python's manual. `octavo bench quality` runs the same at length: 200 prompts, 16 pieces of 512 tokens.

The demo's float weights are what its Q4_1 file holds, so 4 bits with mins find them again. Off that grid is the same
function with other weights: columns are scaled by random factors, which norms and rows take back.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.demo_reference import demo_in_transformers

from octavo.cli.bench.likeness import Comparison, Workload, compare
from octavo.config import EngineConfig

WORKLOAD = Workload(num_texts=6, text_len=256, num_prompts=24, prompt_len=24, output_len=16)


@pytest.fixture(scope="module")
def folder(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in bfloat16, in Hugging Face layout."""
    target = tmp_path_factory.mktemp("demo")
    demo_in_transformers(demo_file).to(torch.bfloat16).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def off_grid(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in bfloat16 as if it had never been in 4 bits."""
    model = demo_in_transformers(demo_file)
    generator = torch.Generator().manual_seed(0)

    def factors(number: int) -> torch.Tensor:
        return torch.exp(0.2 * torch.randn(number, generator=generator))

    with torch.no_grad():
        for layer in model.model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            for norm, products in (
                (layer.input_layernorm, (attn.q_proj, attn.k_proj, attn.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                by_input = factors(len(norm.weight))
                norm.weight.div_(by_input)
                for product in products:
                    product.weight.mul_(by_input)
            by_width, by_value = factors(mlp.down_proj.in_features), factors(attn.v_proj.out_features)
            mlp.up_proj.weight.mul_(by_width[:, None])
            mlp.down_proj.weight.div_(by_width)
            attn.v_proj.weight.mul_(by_value[:, None])
            by_head = by_value.view(-1, 1, attn.head_dim).expand(-1, attn.num_key_value_groups, -1)
            attn.o_proj.weight.div_(by_head.flatten())
    target = tmp_path_factory.mktemp("off-grid")
    model.to(torch.bfloat16).save_pretrained(target)
    return target


def compared(model: Path, tokenizer: Path, reference: str = "transformers", **settings: Any) -> Comparison:
    config = EngineConfig.of(model=str(model), tokenizer=str(tokenizer), num_threads=2, **settings)
    return compare(config, reference, None, WORKLOAD)


@pytest.mark.parametrize(
    ("settings", "weights", "growth", "gap"),
    [
        ({"dtype": "bfloat16"}, "bfloat16: 121", 0.5, 0.1),
        ({"quantization": "int8"}, "int8: 121", 1.0, 0.7),
        ({"quantization": "int4"}, "int4 with mins: 90, int8: 31", 5.0, 0.7),
    ],
)
def test_a_precision_keeps_its_gate(
    settings: dict[str, Any], weights: str, growth: float, gap: float, folder: Path, demo_file: Path
) -> None:
    found = compared(folder, demo_file, **settings)
    assert found.precision.endswith(weights)
    assert found.num_positions == 24 * 16
    assert list(found.unmet(growth, gap)) == [], "\n".join(found.lines())


def test_weights_that_never_were_in_4_bits_keep_the_gate(off_grid: Path, demo_file: Path) -> None:
    """Thanks to calibration, on a text of its own; all columns alike cost a quarter."""
    found = compared(off_grid, demo_file, "octavo", quantization="int4")
    assert found.precision.endswith("int4 with mins: 90, int8: 31")
    assert list(found.unmet(5.0, None)) == [], "\n".join(found.lines())


def test_a_file_of_4_bits_keeps_its_gate(demo_file: Path) -> None:
    """Packed as it is stored: only activations are rounded."""
    found = compared(demo_file, demo_file, "octavo")
    assert found.precision.endswith("int4 with mins: 120, int8: 1")
    assert list(found.unmet(1.0, 0.7)) == [], "\n".join(found.lines())
