"""What `octavo models` says is so."""

import json
from pathlib import Path
from typing import Any

import pytest
from doubles.hf_models import HF_CASES
from repo.sources import text_of
from transformers import CONFIG_MAPPING

from octavo.cli.main import main
from octavo.cli.models import markdown
from octavo.model.catalog import SCALINGS, TRIED_THROUGH_TRANSFORMERS, families
from octavo.model.families import FAMILIES

README = Path("README.md")


def test_every_family_is_listed_once() -> None:
    assert [entry.model_type for entry in families()] == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", ("full", "gated", "rope", "llama")),
        ("mistral", ("full, sliding", "gated", "rope", None)),
        ("gemma2", ("full, sliding, soft cap", "gated", "rope", "gemma2")),
        ("gpt2", ("full", "plain", "learned", "gpt2")),
        ("gpt_oss", ("full, sliding, sinks", "experts by softmax", "rope", "gpt-oss")),
        ("cohere2", ("full, sliding", "gated, beside attention", "rope in some layers", "cohere2")),
        ("deepseek_v3", ("latent", "gated, experts by sigmoid, shared expert", "rope", "deepseek2")),
        ("qwen3_moe", ("full, sliding, q/k norm", "experts by softmax", "rope", "qwen3moe")),
    ],
)
def test_what_a_family_takes(model_type: str, expected: tuple[Any, ...]) -> None:
    (entry,) = (entry for entry in families() if entry.model_type == model_type)
    lists = (entry.attention, entry.feed_forward, entry.positions)
    assert (*map(", ".join, lists), entry.gguf) == expected


def test_who_has_rope_takes_every_scaling() -> None:
    for entry in families():
        assert entry.rope_scalings == (() if entry.positions == ("learned",) else tuple(SCALINGS))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_families_that_slide_are_those_of_transformers(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    assert ("sliding_window" in FAMILIES[model_type].defaults) == hasattr(config, "sliding_window")


def test_what_is_said_to_be_tried_through_transformers_is() -> None:
    tried = {case.config().model_type for case in HF_CASES.values()}
    assert set(TRIED_THROUGH_TRANSFORMERS) == tried - set(FAMILIES)


def test_the_forms_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["family", "attention", "feed-forward", "positions", "GGUF"]
    assert [line.split()[0] for line in lines[1 : len(FAMILIES) + 1]] == sorted(FAMILIES)
    assert lines[-2].startswith("hf, for embeddings alone: albert, bert,")
    assert main(["models", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {entry["program"] for entry in report["families"]} == {"native"}
    assert {entry["model_type"]: entry["gguf"] for entry in report["families"]}["cohere"] == "command-r"
    assert {entry["program"] for entry in report["encoders"]} == {report["others"]["program"]} == {"hf"}
    assert "gptq" in report["weights"]["packed"]
    assert main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown() + "\n"


def test_readme_has_the_table() -> None:
    """To make it anew: octavo models --markdown."""
    assert f"\n{markdown()}\n" in text_of(README)
