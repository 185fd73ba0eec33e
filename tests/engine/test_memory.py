"""What memory and threads the engine takes is what it says, and it gives them back."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.tiny_llm import greedy

from octavo import LLM
from octavo.errors import ConfigError

MIB = 1 << 20

MEASURE = """
import gc, sys
from pathlib import Path
import torch
from octavo import LLM, SamplingParams
import octavo.executor.local, octavo.text.tokenizer, octavo.model.describe

def taken():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024

LLM({tiny!r}, num_threads=1, dtype="float32", num_blocks_override=8).close()
gc.collect()
before = taken()
llm = LLM({model!r}, num_threads=1, dtype="float32", max_num_batched_tokens=256, max_num_seqs=8, **{settings!r})
llm.generate("a b c", SamplingParams(max_tokens=2))
llm.generate({{"prompt_token_ids": [5] * 200}}, SamplingParams(max_tokens=1))
gc.collect()
plan = llm.executor.memory_plan
print(taken() - before, plan.reserved, plan.kv_bytes, plan.weights)
"""


def measure(model: str, tiny: Path, **settings: object) -> tuple[int, int, int, int]:
    """Bytes: taken by the process, planned, of KV blocks, of weights. Blocks are poisoned, so all are touched."""
    script = MEASURE.format(model=model, tiny=str(tiny), settings=settings)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    taken, reserved, kv, weights = map(int, run.stdout.split())
    return taken, reserved, kv, weights


def test_the_plan_equals_the_processs_memory(demo_file: Path, tiny_folder: Path) -> None:
    taken, reserved, kv, weights = measure("demo", tiny_folder, max_model_len=2048, num_blocks_override=200)
    assert kv > 250 * MIB and weights > 500 * MIB
    assert taken == pytest.approx(reserved, rel=0.1)


def test_the_plan_adds_up(tiny: LLM) -> None:
    plan = tiny.executor.memory_plan
    assert plan.reserved == plan.weights + plan.workspace + plan.kv_bytes
    assert plan.total - (plan.total - plan.free) - plan.reserved == plan.left
    assert plan.kv_bytes == 256 * 16 * 2 * (2 * 2 * 16 * 4)  # blocks, tokens, layers, keys and values of two heads
    assert plan.max_tokens == 256 * 16
    text = str(plan)
    for word in ("memory", "in use before", "weights", "workspace", "256 blocks of 16 tokens", "left"):
        assert word in text


def test_a_length_that_does_not_fit_names_the_largest_and_both_settings(make_llm, monkeypatch) -> None:
    from octavo_cpu import host

    monkeypatch.setattr(host, "memory", lambda: (40 * MIB, 40 * MIB))
    settings = {"num_blocks_override": None, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    llm = make_llm(**settings)
    assert llm.executor.memory_plan.max_tokens >= 512  # a default model is served by default settings
    plan = llm.executor.memory_plan
    need = (plan.weights + plan.workspace + 300 * 512) / (40 * MIB)  # room for some 300 tokens of 512 bytes
    with pytest.raises(ConfigError) as caught:
        make_llm(memory_utilization=need, **settings)
    message = str(caught.value)
    assert "max_model_len 512 needs" in message and "memory_utilization" in message and "\n" not in message
    largest = int(message.partition("the largest that fits is ")[2].split(":")[0])
    assert 0 < largest < 512
    (output,) = make_llm(memory_utilization=need, max_model_len=largest, **settings).generate("hello", greedy(3))
    assert output.error is None
    with pytest.raises(ConfigError, match="the largest that fits"):
        make_llm(memory_utilization=need, max_model_len=largest + 8, **settings)


def test_ten_engines_made_and_deleted_leave_memory_flat(make_llm, tiny_folder: Path) -> None:
    def taken() -> int:
        gc.collect()
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024

    sizes = []
    for number in range(10):
        # 32 MiB of KV blocks each, all of them touched.
        llm = LLM(tiny_folder, dtype="float32", num_threads=1, block_size=16, num_blocks_override=2048)
        llm.generate("hello", greedy(3))
        if number % 2:
            llm.close()
        del llm
        sizes.append(taken())
    assert sizes[-1] - sizes[1] < 24 * MIB, [size // MIB for size in sizes]


def test_threads_come_from_affinity_and_are_printed(make_llm) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert make_llm(num_threads=None).executor.facts()["threads"] == "1 (affinity)"
    finally:
        os.sched_setaffinity(0, allowed)
    assert make_llm(num_threads=1).executor.facts()["threads"] == "1 (setting num_threads)"


def test_threads_come_from_the_cgroup(make_llm, monkeypatch, tmp_path: Path) -> None:
    from octavo_cpu import host

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (tmp_path / "sys/fs/cgroup/box").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/box/cpu.max").write_text("100000 100000\n")
    usable = host.usable_threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(host, "usable_threads", lambda: usable(tmp_path))
    assert make_llm(num_threads=None).executor.facts()["threads"] == "1 (cgroup quota of 1 processors)"
    make_llm(num_threads=1)
