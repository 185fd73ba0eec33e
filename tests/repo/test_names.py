"""The core names no device, vendor or kernel language: not in code, strings or comments."""

import io
import re
import tokenize
from pathlib import Path

import pytest
from repo.sources import text_of, tracked

# Whole words, also as a part of a snake_case or CamelCase name: cudaGraph, is_cuda, "avx512".
WORDS = (
    "amd|amx|ascend|avx\\d*|cpu|cublas|cuda|cudnn|cutlass|gaudi|gpu|habana|hip|hpu|intel|metal|mps|nccl|neon|npu|"
    "nvidia|opencl|openmp|openvino|rccl|rocm|sse\\d*|sycl|tpu|triton|vulkan|xpu"
)
FORBIDDEN = re.compile(rf"(?:{WORDS})s?")
PARTS = re.compile(r"[A-Z]+s?(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")  # of an identifier: int64Index -> int64, Index

# Names under which users know settings and metrics elsewhere, as aliases of ours.
ALLOWED = {
    Path("core/octavo/config.py"): {"gpu_memory_utilization", "num_gpu_blocks_override"},
    Path("core/octavo/server/metrics.py"): {  # names under which dashboards look for ours
        "cpu_cache_usage_perc",
        "cpu_prefix_cache_hit_rate",
        "gpu_cache_usage_perc",
        "gpu_prefix_cache_hit_rate",
        "num_cpu_blocks",
        "num_gpu_blocks",
    },
}
TO_HOST = re.compile(r"\.cpu\(\)")  # torch's only word for a copy in host memory, wherever the tensor lives
CHECKED = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)


def names_in(source: str, allowed: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """Line and word of each device name in a source."""
    source = TO_HOST.sub(".host()", source)
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in CHECKED:
            continue
        text = token.string
        for name in allowed:
            text = text.replace(name, "")
        found += [(token.start[0], word) for word in PARTS.findall(text) if FORBIDDEN.fullmatch(word.lower())]
    return found


@pytest.mark.parametrize("path", tracked((".py",), "core/octavo"), ids=str)
def test_core_names_no_device(path: Path) -> None:
    found = names_in(text_of(path), frozenset(ALLOWED.get(path, ())))
    assert found == [], f"{path} names devices (line, word): {found}; ask what a platform can do, not which it is"


@pytest.mark.parametrize(
    "path", [path for path in tracked((".py",), "core/octavo") if "init" not in path.name], ids=str
)
def test_file_names_no_device(path: Path) -> None:
    assert [word for word in PARTS.findall(path.name) if FORBIDDEN.fullmatch(word)] == []


def test_allowed_names_are_still_in_use() -> None:
    for path, names in ALLOWED.items():
        assert all(name in text_of(path) for name in names)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = torch.cuda.is_available()", ["cuda"]),
        ("is_cuda = 1", ["cuda"]),
        ("cudaGraph = NvidiaGPU", ["cuda", "Nvidia", "GPU"]),
        ("# faster on AVX512", ["AVX512"]),
        ('device = "cpu"', ["cpu"]),
        ('"""Works on GPUs."""', ["GPUs"]),
        ("y = x.cpu()", []),
        ("y = x.to('cpu') if on_cpu() else x.cpu", ["cpu", "cpu", "cpu"]),
        ("membership, ship, chip, tempus, cpuset_of", []),
        ("amdahl = metallic = hips_ter", ["hips"]),
    ],
)
def test_the_rule_itself(source: str, words: list[str]) -> None:
    assert [word for _, word in names_in(source + "\n")] == words


def test_allowed_names_hide_nothing_else() -> None:
    source = 'x = ("gpu_memory_utilization", "gpu")\n'
    assert names_in(source, frozenset({"gpu_memory_utilization"})) == [(1, "gpu")]
