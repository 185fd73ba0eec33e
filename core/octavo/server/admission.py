"""How much may wait: beyond that, a request is told at once, and when to come again."""

import math

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.history import RequestRecord
from octavo.errors import BusyError
from octavo.server.metrics import Metrics

__all__ = ["Admission"]

RATE_SECONDS = 30.0  # how far back the rate of admissions is measured
UNKNOWN_SECONDS = 5.0  # to come again in, while there is no rate
MAX_SECONDS = 300.0


class Admission:
    """Bounds what waits to be admitted, by requests and by their prompts' tokens."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics, *, max_requests: int, max_tokens: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        engine.gate = self.check

    def check(self, record: RequestRecord) -> None:
        """Let a request in.

        Raises:
            BusyError: too much waits.

        """
        history = self._engine.history
        if history.num_waiting >= self._max_requests:
            self._metrics.reject("queue_requests")
            raise self._busy(f"{history.num_waiting} requests wait", "max_waiting_requests", self._max_requests)
        num_tokens = history.num_waiting_tokens + record.num_prompt_tokens
        if num_tokens > self._max_tokens and history.num_waiting:  # one alone may be longer: it waits for no other
            self._metrics.reject("queue_tokens")
            raise self._busy(f"{num_tokens} prompt tokens would wait", "max_waiting_tokens", self._max_tokens)

    def retry_after(self) -> float:
        """Seconds in which, at the rate of late, what waits now will have been admitted."""
        history = self._engine.history
        rate = history.rate("num_admitted", RATE_SECONDS)
        seconds = history.num_waiting / rate if rate > 0 else UNKNOWN_SECONDS
        return float(min(max(math.ceil(seconds), 1), MAX_SECONDS))

    def _busy(self, what: str, setting: str, limit: int) -> BusyError:
        return BusyError(f"{what}, at most {limit} may ({setting}); ask again later", self.retry_after())
