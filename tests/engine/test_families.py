"""Every native family through the engine gives transformers' greedy tokens."""

from pathlib import Path

import pytest
from doubles.engine_parity import check_through_engine
from doubles.family_cases import CASES


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    check_through_engine(CASES[case], tmp_path, model_impl="native", vocabulary=150, program="generic|compiled")
