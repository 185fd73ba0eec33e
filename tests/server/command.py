"""The command in a process of its own, as its users start it."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from server.served import SETTINGS

__all__ = ["Command"]


class Command:
    """`octavo serve` in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        command = [sys.executable, "-m", "octavo.cli.main", "serve", str(folder), "--port=0", *settings, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str) -> str:
        end = time.monotonic() + 60
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < end, self.text
            assert self.process.poll() is None or re.search(pattern, self.text), self.text
            time.sleep(0.02)
        return found[1] if found.groups() else found[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
