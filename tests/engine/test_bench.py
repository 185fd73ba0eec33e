"""octavo bench on a tiny model: what it prints and writes; no figure is held to a time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli.bench.workload import Length, Shape, make_requests
from octavo.cli.main import main
from octavo.contract import Probe, ProgramCosts
from octavo_cpu.platform import CpuPlatform

SMALL = ["--dtype", "float32", "--num-threads", "1", "--block-size", "16", "--num-blocks-override", "64"]
PROBE = Probe(1e9, {torch.float32: 1e9})


def bench(folder: Path, out: Path, *argv: str) -> Any:
    benchmark, *flags = argv
    assert main(["bench", benchmark, str(folder), *SMALL, "--json", str(out), *flags]) == 0
    return json.loads(out.read_text())


def medians(variant: Any) -> dict[str, float]:
    return {key: figure["median"] for key, figure in variant["figures"].items()}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A platform that measures its limits and leaves counting to core; the sizes that it was asked for."""
    asked: list[int] = []

    def probe(self: CpuPlatform, num_bytes: int) -> Probe:
        asked.append(num_bytes)
        return PROBE

    monkeypatch.setattr(CpuPlatform, "probe", probe)
    monkeypatch.setattr(CpuPlatform, "costs", lambda self, program: None)
    return asked


def test_latency(tiny_folder: Path, tmp_path: Path, probed: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input-len", "20", "--output-len", "5", "--repeats", "3"]
    found = bench(tiny_folder, tmp_path / "out.json", "latency", *flags)
    [variant] = found["variants"]
    figures = variant["figures"]
    assert len(figures["first_token"]["values"]) == 3
    for key in ("first_token", "further_tokens_p50", "further_tokens_a_second", "whole_request"):
        assert figures[key]["median"] > 0
    # The tiny model is float32: its step of one token reads all layers and the head, its prompt computes.
    costs = variant["costs"]
    assert costs["told_by"] == "the spec"
    assert costs["layer_bytes"] + costs["head_bytes"] <= found["memory"]["weights"]
    assert probed == [costs["layer_bytes"] + costs["head_bytes"]] * 3
    for key in ("first_token_share", "further_tokens_share"):
        assert math.isfinite(figures[key]["median"])
        assert figures[key]["median"] > 0
    assert variant["limits"] == [{"read_bytes_per_second": 1e9, "ops_per_second": {"float32": 1e9}}] * 3
    out = capsys.readouterr().out
    assert "1 request, 20 tokens in, 5 out" in out
    assert "% of the machine's limit" in out
    assert "1.0 GB/s" in out


def test_the_limit_is_the_work_at_the_probed_rates(tiny_folder: Path, tmp_path: Path, probed: list[int]) -> None:
    found = bench(tiny_folder, tmp_path / "out.json", "latency", "--input-len", "20", "--output-len", "1")
    [variant] = found["variants"]
    figures, costs = variant["figures"], variant["costs"]
    assert "further_tokens_p50" not in figures
    for i, milliseconds in enumerate(figures["first_token"]["values"]):
        limit = max(costs["bytes"][i], costs["operations"][i]) / 1e9
        assert figures["first_token_share"]["values"][i] == pytest.approx(100 * limit / (milliseconds / 1e3))


def test_the_platform_knows_better_what_its_program_reads(
    tiny_folder: Path, tmp_path: Path, probed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ProgramCosts(10**6, 10**5, torch.float32, torch.float32, torch.float32)
    monkeypatch.setattr(CpuPlatform, "costs", lambda self, program: told)
    found = bench(tiny_folder, tmp_path / "out.json", "latency", "--input-len", "9", "--output-len", "1")
    costs = found["variants"][0]["costs"]
    assert (costs["told_by"], costs["layer_bytes"], costs["head_bytes"]) == ("the platform", 10**6, 10**5)
    assert probed == [1_100_000] * 5
    assert all(1_100_000 < num_bytes < 1_200_000 for num_bytes in costs["bytes"])  # and some keys and values


def test_without_a_probe_it_says_so(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "probe", lambda self, num_bytes: None)
    found = bench(tiny_folder, tmp_path / "out.json", "latency", "--output-len", "2", "--input-len", "9")
    assert found["variants"][0]["limits"] is None
    assert "first_token_share" not in found["variants"][0]["figures"]
    assert "the platform measures none" in capsys.readouterr().out


def test_throughput(tiny_folder: Path, tmp_path: Path, probed: list[int]) -> None:
    flags = [
        "--num-prompts",
        "6",
        "--input-len",
        "5:40",
        "--output-len",
        "3:9",
        "--repeats",
        "2",
        "--max-num-seqs",
        "4",
    ]
    found = bench(tiny_folder, tmp_path / "out.json", "throughput", *flags)
    [variant] = found["variants"]
    values = medians(variant)
    shape = Shape(6, Length(5, 40), Length(3, 9))
    requests = make_requests(shape, 1, 300)
    num_out = sum(request.num_output_tokens for request in requests)
    figures = variant["figures"]
    seconds = figures["seconds"]["values"]
    assert [rate * s for rate, s in zip(figures["output_tokens_a_second"]["values"], seconds, strict=True)] == (
        pytest.approx([num_out] * 2)
    )
    num_in = sum(len(request.token_ids) for request in requests)
    assert [rate * s for rate, s in zip(figures["all_tokens_a_second"]["values"], seconds, strict=True)] == (
        pytest.approx([num_in + num_out] * 2)
    )
    assert values["KV_blocks_allocated_but_unused"] == 0
    assert 0 < values["room_for_tokens_in_them_that_holds_none"] < 100
    assert values["preemptions"] == 0
    assert values["share"] > 0


def test_prefix_cache_against_none(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--compare",
        "prefix-cache",
        "--prefix-len",
        "64",
        "--input-len",
        "8",
        "--output-len",
        "2",
        "--repeats",
        "2",
    ]
    found = bench(tiny_folder, tmp_path / "out.json", "throughput", "--num-prompts", "3", *flags)
    off, on = found["variants"]
    assert (off["name"], on["name"]) == ("cache off", "cache on")
    assert medians(off)["prompt_tokens_from_the_prefix_cache"] == 0
    assert medians(on)["prompt_tokens_from_the_prefix_cache"] == pytest.approx(100 * 64 / 72)
    assert medians(on)["tokens_a_step"] < medians(off)["tokens_a_step"]
    assert set(found["ratios"]) == {"cache on/cache off"}
    assert "cache on/cache off" in capsys.readouterr().out


def test_a_new_prefix_is_computed_in_each_repeat(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ["--prefix-len", "64", "--new-prefix", "--input-len", "8", "--output-len", "2", "--repeats", "2"]
    [variant] = bench(tiny_folder, tmp_path / "out.json", "throughput", "--num-prompts", "3", *flags)["variants"]
    assert variant["figures"]["prompt_tokens_from_the_prefix_cache"]["values"] == [pytest.approx(100 * 128 / 216)] * 2


def test_continuous_against_static_batches(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ["--num-prompts", "7", "--input-len", "4:30", "--output-len", "2:12", "--max-num-seqs", "3"]
    found = bench(tiny_folder, tmp_path / "out.json", "throughput", "--compare", "batching", "--repeats", "1", *flags)
    padded, static, continuous = map(medians, found["variants"])
    assert padded["steps"] >= static["steps"] >= continuous["steps"]
    assert padded["tokens_a_step"] * padded["steps"] > static["tokens_a_step"] * static["steps"]
    assert set(found["ratios"]) == {"continuous/padded", "continuous/static"}


def test_sampled_against_greedy(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ["--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--compare", "sampling", "--repeats", "1"]
    greedy, sampled = bench(tiny_folder, tmp_path / "out.json", "throughput", *flags)["variants"]
    assert (greedy["temperature"], sampled["temperature"], sampled["top_p"]) == (0.0, 0.8, 0.95)


def test_json_alone_on_stdout(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "latency", str(tiny_folder), *SMALL, "--json", "-", "--output-len", "2", "--input-len", "4"]
    assert main([*argv, "--repeats", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["benchmark"] == "latency"


def test_a_workload_that_does_not_fit(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", str(tiny_folder), *SMALL, "--input-len", "5000"]) == 1
    captured = capsys.readouterr()
    assert "512" in captured.err
    assert captured.err.startswith("octavo bench latency: error: ")
