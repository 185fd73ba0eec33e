"""The table of faults: `octavo info` shows each with plugin, hook and cause, and takes no other platform for it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doubles.plugins import platform_source, write_distribution

from octavo.contract import API_VERSION

CONTRACT = ".".join(map(str, API_VERSION))
BEST = 1000  # above whatever is installed where the tests run
GOOD = platform_source("chip", priority=BEST)
OFFERS_OP = """
    def ops(self):
        from octavo.contract import OpImpl, RMSNorm
        from octavo.contract.reference import rms_norm
        return [OpImpl("rms_norm", "chip", "native", FN)]
"""
OFFERS_ATTENTION = """
    def attention_backends(self):
        from octavo.contract.reference_attention import ReferenceAttention
        class Liar(ReferenceAttention):
            name = "liar"
            def attend(self, plan, layer, query, out, sinks=None):
                BODY
        return [Liar(self.device)]
"""
HANG = "import time; time.sleep(100)"
SHARED = "from octavo.contract import hookimpl\n@hookimpl\ndef octavo_platforms():\n    BODY\n"


def with_member(member: str) -> str:
    return GOOD.replace("    def diagnostics(self):", f"{member}\n    def diagnostics(self):")


def with_op(fn: str) -> str:
    return with_member(OFFERS_OP.replace("FN", fn))


def with_attention(body: str) -> str:
    return with_member(OFFERS_ATTENTION.replace("BODY", body))


@dataclass(frozen=True)
class Fault:
    """Module sources of plugins, and what must be said: the hook, and pieces of the cause."""

    hook: str
    said: tuple[str, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    hangs: bool = False


def of(source: str) -> dict[str, str]:
    return {"chip": source}


FAULTS = {
    "import-error": Fault("load", ("No module named 'chip_driver'",), of("import chip_driver")),
    "undefined-symbol": Fault(
        "load", ("OSError: libchip.so: undefined symbol: f",), of("raise OSError('libchip.so: undefined symbol: f')")
    ),
    "raise-in-probe": Fault(
        "octavo_platforms", ("RuntimeError: driver 1",), of(SHARED.replace("BODY", "raise RuntimeError('driver 1')"))
    ),
    "hang-in-probe": Fault("octavo_platforms", ("hangs",), of(SHARED.replace("BODY", HANG)), hangs=True),
    "hang-in-create": Fault(
        "create",
        ("hangs",),
        of(GOOD.replace("lambda device: Toy()", "lambda device: __import__('time').sleep(100)")),
        True,
    ),
    "raise-in-create": Fault(
        "create", ("ZeroDivisionError",), of(GOOD.replace("lambda device: Toy()", "lambda device: 1 / 0"))
    ),
    "duplicate-names": Fault(
        "octavo_platforms",
        ("platform 'chip' is given 2 times, by chip", "none of them is taken"),
        of(GOOD) | {"other": GOOD},
    ),
    "wrong-major": Fault(
        "octavo_platforms",
        (f"platform 'chip' was written for contract 7.0; this Octavo has {CONTRACT} and serves major 0",),
        of(GOOD.replace("(0, 9)", "(7, 0)")),
    ),
    "misspelt-hook": Fault(
        "register", ("did you mean 'octavo_platforms'?",), of(GOOD.replace("def octavo_p", "def octavo_q"))
    ),
    "op-of-wrong-signature": Fault(
        "its offers",
        ("failed in ops(): TypeError: fn of rms_norm must take one argument",),
        of(with_op("lambda x, weight, eps: x")),
    ),
    "op-that-raises": Fault(
        "ops", ("chip's rms_norm(float32", "says yes and raises IndexError"), of(with_op("lambda a: [][0]"))
    ),
    "op-that-is-wrong": Fault(
        "ops", ("chip's rms_norm(float32", "is off by"), of(with_op("lambda a: rms_norm(a) * 2"))
    ),
    "attention-that-raises": Fault(
        "attention_backends",
        ("liar says yes to", "raises RuntimeError: no image"),
        of(with_attention("raise RuntimeError('no image')")),
    ),
    "attention-that-is-wrong": Fault(
        "attention_backends", ("liar: row 0 is off by",), of(with_attention("out.zero_()"))
    ),
    "attention-that-hangs": Fault("attention_backends", ("hangs",), of(with_attention(HANG)), hangs=True),
    "offers-no-list": Fault(
        "its offers", ("failed in ops(): a list of OpImpl is needed",), of(with_member("    def ops(self): return 7"))
    ),
}


def info(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "info", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    for plugin, source in fault.modules.items():
        write_distribution(
            tmp_path, f"vendor-{plugin}", {plugin: f"{plugin}_plugin"}, {f"{plugin}_plugin": source}, version="1.2"
        )
    done = info(tmp_path, "--json", "--timeout", "1.5" if fault.hangs else "60")
    assert done.returncode == 1
    if fault.hangs:
        assert f"octavo: plugin chip (vendor-chip 1.2) in {fault.hook} hangs" in done.stderr
        assert done.stdout == "", "no other platform is taken for it"
        return
    report = json.loads(done.stdout)
    problem = report["problems"][0]
    assert (problem["plugin"], problem["origin"], problem["stage"]) == ("chip", "vendor-chip 1.2", fault.hook)
    for piece in fault.said:
        assert piece in problem["reason"]
    assert report["chosen"] is None or report["chosen"]["name"] == "chip", "no other platform is taken for it"


def test_a_tie_is_named(tmp_path: Path) -> None:
    for name in ("chip", "other"):
        source = platform_source(name, priority=BEST)
        write_distribution(tmp_path, f"vendor-{name}", {name: f"{name}_plugin"}, {f"{name}_plugin": source})
    done = info(tmp_path)
    assert done.returncode == 1
    assert f"several platforms have priority {BEST}, set platform to one of them: chip from chip" in done.stderr
    assert "other from other (vendor-other 1.0)" in done.stderr


def test_a_good_one_is_not_blamed(tmp_path: Path) -> None:
    good = with_attention("return super().attend(plan, layer, query, out, sinks)").replace("class Liar", "class Good")
    source = good.replace("Liar(", "Good(")
    write_distribution(tmp_path, "vendor-chip", {"chip": "chip_plugin"}, {"chip_plugin": source})
    done = info(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["problems"] == []
