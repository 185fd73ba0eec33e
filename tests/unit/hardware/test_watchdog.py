"""A plugin that hangs is named, whether or not it holds the interpreter lock."""

import subprocess
import sys

import pytest

SLOW = """
from octavo.hardware.watchdog import Watchdog
import time
def plugin_code():
    time.sleep(0.6)
    return 7
print(Watchdog(timeout=0.2).call("plugin slow (pack 1.0) in load", plugin_code))
"""

# PyDLL keeps the interpreter lock during the call, as a module's initialisation does.
STUCK = """
import ctypes, time
from octavo.hardware.watchdog import Watchdog
def holds_the_lock():
    ctypes.PyDLL(None).sleep(60)
def sleeps():
    time.sleep(60)
Watchdog(timeout=0.2, exit_on_hang=True).call("plugin stuck (pack 1.0) in octavo_platforms", FUNCTION)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)


def test_a_slow_call_is_named_and_goes_on() -> None:
    done = run(SLOW)
    assert (done.returncode, done.stdout) == (0, "7\n")
    assert "octavo: plugin slow (pack 1.0) in load hangs, it has not come back for 0.2 seconds" in done.stderr
    assert "in plugin_code" in done.stderr


@pytest.mark.parametrize("function", ["holds_the_lock", "sleeps"])
def test_a_command_ends_and_names_what_hangs(function: str) -> None:
    done = run(STUCK.replace("FUNCTION", function))
    assert done.returncode == 1
    assert "plugin stuck (pack 1.0) in octavo_platforms" in done.stderr
    assert f"in {function}" in done.stderr


def test_the_timer_of_others_is_left_alone() -> None:
    code = """
import faulthandler, time
from octavo.hardware.watchdog import Watchdog
faulthandler.dump_traceback_later(0.5, exit=True)
Watchdog().call("plugin x in load", int)
time.sleep(30)
"""
    done = run(code)
    assert done.returncode == 1
    assert "Timeout (0:00:00.5" in done.stderr
