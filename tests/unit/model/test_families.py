"""Every family's program gives transformers' logits: whole, in chunks and batched."""

from pathlib import Path

import pytest
from doubles.family_cases import CASES, longrope
from doubles.tiny_models import Tiny, base

from .harness import check_parity


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    check_parity(CASES[case], tmp_path)


def test_long_factors_serve_long_models(tmp_path: Path) -> None:
    rope = {**longrope(6), "partial_rotary_factor": 0.75}
    tiny = Tiny("Phi3", base(rope_parameters=rope, original_max_position_embeddings=16))
    check_parity(tiny, tmp_path, lengths=(48, 21, 33))  # transformers picks factors by the prompt: all are long


def test_dynamic_rope_is_settled_by_the_served_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny = Tiny("Llama", base(rope_parameters=rope, max_position_embeddings=16))
    check_parity(tiny, tmp_path, max_model_len=48, lengths=(48, 48))  # as transformers has it for 48 tokens
