"""Models that run through transformers give its own greedy tokens: alone, batched, cached, in chunks, preempted."""

from pathlib import Path

import pytest
from doubles.engine_parity import check_through_engine
from doubles.hf_models import HF_CASES, VOCABULARY


@pytest.mark.parametrize("case", HF_CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    check_through_engine(HF_CASES[case], tmp_path, model_impl="hf", vocabulary=VOCABULARY, program="transformers'")
