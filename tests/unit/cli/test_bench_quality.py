"""octavo bench quality: a model beside itself, what is said of a difference, and what is demanded of it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli.bench.likeness import Comparison, Workload, compare
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.testing.bench import Bench
from octavo_cpu.platform import CpuPlatform

WORKLOAD = Workload(num_texts=3, text_len=24, num_prompts=5, prompt_len=6, output_len=4)
FLAGS = ["--num-texts", "3", "--text-len", "24", "--num-prompts", "5", "--prompt-len", "6", "--output-len", "4"]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A tiny model with a tokenizer of bytes."""
    with Bench("cpu") as bench:
        yield bench.model.folder


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.of(model=str(folder), num_threads=1, num_blocks_override=64, **settings)


def test_a_model_is_like_itself(folder: Path) -> None:
    for reference in ("octavo", "transformers"):
        found = compare(config(folder, dtype="float32"), reference, None, WORKLOAD)
        assert (found.num_positions, found.num_parted, found.largest_gap) == (20, 0, 0.0)
        assert abs(found.growth) < 1e-2
        assert found.perplexity > 1
        assert found.reference.endswith({"octavo": "by Octavo", "transformers": "by transformers"}[reference])


def test_a_difference_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that is judged takes every token's logit for its neighbour's."""
    from octavo.model.generic import GenericProgram

    logits = GenericProgram._logits

    def wrong(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden)
        return found.roll(1, -1) if hidden.dtype == torch.bfloat16 else found

    monkeypatch.setattr(GenericProgram, "_logits", wrong)
    monkeypatch.setattr(CpuPlatform, "compile", lambda self, request: None)
    found = compare(config(folder, dtype="bfloat16"), "octavo", None, WORKLOAD)
    assert found.num_parted == found.num_positions
    assert found.growth > 10
    assert found.largest_gap > 0.1


def test_a_text_of_ones_own(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("all work and no play " * 10)
    found = compare(config(folder, dtype="bfloat16"), "octavo", str(text), WORKLOAD)
    assert found.precision.startswith("bfloat16; weights: ")
    assert found.num_positions == 20
    text.write_text("short")
    with pytest.raises(ConfigError, match="the text has 5 tokens, too few for 3 pieces of 24"):
        compare(config(folder), "octavo", str(text), WORKLOAD)
    with pytest.raises(ConfigError, match="cannot read the text"):
        compare(config(folder), "octavo", str(tmp_path / "none"), WORKLOAD)


def test_4_bits_fitted_to_a_text_of_ones_own(folder: Path, tmp_path: Path) -> None:
    """The reference, which has no use for it, runs all the same."""
    text = tmp_path / "text"
    text.write_text("all work and no play " * 100)
    found = compare(config(folder, quantization="int4", calibration_file=str(text)), "octavo", None, WORKLOAD)
    assert "int4 with mins: " in found.precision


FOUND = Comparison("r", "p", 10.0, 10.2, 2.0, 0.5, 200, 3, [0.4, 0.1, 0.02])


def test_what_is_said_and_demanded() -> None:
    assert list(FOUND.lines())[2:] == [
        "perplexity  10.200, reference 10.000: +2.00% (+-0.50)",
        "agreement   98.50% of 200 likeliest tokens",
        "largest gap 0.400; 2 of 3 that part are at 0.1 or more",
    ]
    assert list(FOUND.unmet(2.0, 0.4)) == list(FOUND.unmet(None, None)) == []
    assert list(FOUND.unmet(1.0, 0.1)) == [
        "perplexity grows by 2.00%, 1% is allowed",
        "tokens part at a gap of 0.400, 0.1 is allowed",
    ]
    assert len(list(replace(FOUND, growth=float("nan")).unmet(5.0, None))) == 1


def test_the_command_prints_writes_and_fails(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    line = ["bench", "quality", str(folder), "--dtype", "float32", "--num-threads", "1", *FLAGS]
    assert main([*line, "--json", str(file), "--max-gap", "0.1", "--max-perplexity", "1"]) == 0
    assert "agreement   100.00% of 20 likeliest tokens" in capsys.readouterr().out
    assert json.loads(file.read_text())["num_positions"] == 20
    assert main([*line, "--json", "-", "--max-perplexity", "-50"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_parted"] == 0
    assert "allowed" in captured.err
