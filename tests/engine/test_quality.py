"""Quality gates of precisions on the demo model, whose float32 in transformers is the truth.

Perplexity is of Python's manual. `octavo bench quality` runs the same at length: 200 prompts, 16 pieces of 512 tokens.

The demo's float weights are what its Q4_1 file holds, so 4 bits with mins find them again: of int4 this holds the
kernels and the search for scales, and says nothing of a model that never was in 4 bits.
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


def compared(model: Path, tokenizer: Path, reference: str = "transformers", **settings: Any) -> Comparison:
    config = EngineConfig.of(model=str(model), tokenizer=str(tokenizer), num_threads=2, **settings)
    return compare(config, reference, None, WORKLOAD)


@pytest.mark.parametrize(
    ("settings", "weights", "growth", "gap"),
    [
        ({"dtype": "bfloat16"}, "bfloat16: 121", 0.5, 0.1),
        ({"quantization": "int8"}, "int8: 121", 1.0, 0.7),
        ({"quantization": "int4"}, "int4 with mins: 120, int8: 1", 5.0, 0.7),
    ],
)
def test_a_precision_keeps_its_gate(
    settings: dict[str, Any], weights: str, growth: float, gap: float, folder: Path, demo_file: Path
) -> None:
    found = compared(folder, demo_file, **settings)
    assert found.precision.endswith(weights)
    assert found.num_positions == 24 * 16
    assert list(found.unmet(growth, gap)) == [], "\n".join(found.lines())


def test_a_file_of_4_bits_keeps_its_gate(demo_file: Path) -> None:
    """Packed as it is stored: only activations are rounded."""
    found = compared(demo_file, demo_file, "octavo")
    assert found.precision.endswith("int4 with mins: 120, int8: 1")
    assert list(found.unmet(1.0, 0.7)) == [], "\n".join(found.lines())
