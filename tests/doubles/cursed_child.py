"""An engine process whose steps go wrong as OCTAVO_CURSE says, in place of `octavo.engine.child`.

The variable holds curses, with spaces between them: `kill=ID`, a step with a sequence whose prompt holds this token id
kills the process; `slow=SECONDS`, so long is added to every step; `layers=SECONDS`, the same, with signs of life in
between; `busy=SECONDS`, the same, computing and without a sign of life.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.engine import child
from octavo.engine.loop import EngineCore
from octavo.scheduler.messages import ModelRunnerOutput, SchedulerOutput

__all__ = ["CURSE_VARIABLE", "main"]

CURSE_VARIABLE = "OCTAVO_CURSE"
LAYER_SECONDS = 0.1


class Curse:
    """What befalls the steps of an engine."""

    def __init__(self, engine: EngineCore, curses: dict[str, float]) -> None:
        self._curses = curses
        self._cursed: set[int] = set()
        self._beat: Callable[[], None] | None = None
        self._execute = engine.executor.execute_model
        engine.executor.execute_model = self.execute  # type: ignore[method-assign]
        engine.on_progress = self.on_progress  # type: ignore[method-assign]

    def on_progress(self, beat: Callable[[], None]) -> None:
        """In place of the engine's own."""
        self._beat = beat

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """In place of the executor's own."""
        fatal = self._curses.get("kill")
        self._cursed.update(new.seq_id for new in step.new if fatal in new.token_ids[: new.num_prompt_tokens])
        if self._cursed.intersection(scheduled.seq_id for scheduled in step.scheduled):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._curses.get("slow", 0.0))
        for _ in range(round(self._curses.get("layers", 0.0) / LAYER_SECONDS)):
            time.sleep(LAYER_SECONDS)
            assert self._beat is not None
            self._beat()
        until = time.process_time() + self._curses.get("busy", 0.0)
        while time.process_time() < until:
            pass
        return self._execute(step)


def main(arguments: Sequence[str]) -> int:
    """Run the engine process."""
    load = child.load_engine
    curses = dict(curse.split("=") for curse in os.environ[CURSE_VARIABLE].split())

    def load_cursed(*args: Any, **more: Any) -> Any:
        engine = load(*args, **more)
        assert isinstance(engine, EngineCore)
        Curse(engine, {name: float(value) for name, value in curses.items()})
        return engine

    child.load_engine = load_cursed
    return child.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
