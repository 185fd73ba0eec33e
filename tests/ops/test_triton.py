"""Triton's kernels without a device: interpreted against the reference, and compiled for each kind of device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from octavo.contract import Capabilities, OpSignature
from octavo.testing.cases_ops import CASES, DTYPES, TOLERANCE
from octavo_triton import plugin, rms_norm

# Triton's interpreter cuts bfloat16 off where a device rounds: one unit in the last place more.
TOLERANCES = {**TOLERANCE, torch.bfloat16: 2 * TOLERANCE[torch.bfloat16]}

TARGETS = {
    **{f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (75, 80, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942", "gfx950")},
    **{name: GPUTarget("hip", name, 32) for name in ("gfx1100", "gfx1201")},
}


def test_interpreted_it_equals_the_reference() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_triton.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(DTYPES) * sum(case.op == "rms_norm" for case in CASES)
    for name, result in found.items():
        dtype = getattr(torch, name.rpartition(".")[2])
        assert result["error"] <= TOLERANCES[dtype], name
        assert result["rows"], f"{name}: a row's bits depend on its company"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_for(target: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # or an earlier run would answer
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # said outright, since the default is changing
    assert isinstance(rms_norm.kernel, JITFunction), "TRITON_INTERPRET is set, so nothing can be compiled"
    pointer, integer, number = f"*{dtype}", "i32", "fp32"
    signature = {
        "out": pointer,
        "x": pointer,
        "weight": pointer,
        "stride": integer,
        "hidden_size": integer,
        "eps": number,
        "weight_offset": number,
        "has_weight": "constexpr",
        "tile": "constexpr",
    }
    source = ASTSource(fn=rms_norm.kernel, signature=signature, constexprs={"has_weight": True, "tile": 1024})
    binary = compile(source, target=TARGETS[target], options={"num_warps": 2}).asm
    assert binary["cubin" if target.startswith("sm_") else "hsaco"]


def test_the_plugin_imports_triton_only_when_asked() -> None:
    code = (
        "import sys\n"
        "from octavo.contract import Capabilities\n"
        "from octavo_triton.plugin import octavo_ops\n"
        "assert octavo_ops(Capabilities()) == []\n"
        "assert 'triton' not in sys.modules\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60)


def test_where_triton_is_not_installed_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    (impl,) = plugin.octavo_ops(Capabilities(kernel_languages=("triton",)))
    answer = impl.supports(OpSignature("rms_norm", torch.float32, "cuda", (("hidden_size", 64),)))
    assert answer.reasons == ("the package triton is not installed",)


def test_host_memory_is_served_by_the_interpreter_alone() -> None:
    answer = rms_norm.supports(OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 64),)))
    assert answer.reasons == ("Triton compiles nothing for host memory, and its interpreter is off",)
