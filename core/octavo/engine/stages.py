"""A request's timeline as what it was at, and for how long: for traces and pictures."""

import time
from dataclasses import dataclass

from octavo.engine.history import RequestRecord

__all__ = ["Stage", "stages_of"]


@dataclass(frozen=True)
class Stage:
    """One stretch of a request's life.

    Attributes:
        name: "tokenise", "compile" (the form of its output), "queue", "prefill", "decode", "preempted" or "restart"
            (its engine died).
        begin, end: seconds since the epoch.
        why: what the event said that began it.

    """

    name: str
    begin: float
    end: float
    why: str = ""


def stages_of(record: RequestRecord) -> list[Stage]:
    """From its arrival to its end, or to now, without gaps."""
    end = record.finished or time.time()
    stages: list[Stage] = []
    name, begin, why, has_output = "tokenise", record.received, "", False
    for event in sorted(record.events, key=lambda event: event.time):
        has_output = has_output or event.name == "first token"
        following = _following(event.name, has_output, record.has_form)
        if following is None or following == name:
            continue
        stages.append(Stage(name, begin, event.time, why))
        name, begin, why = following, event.time, event.detail
        if event.name == "finished":
            break
    if name:
        stages.append(Stage(name, begin, max(end, begin), why))
    return stages


def _following(event: str, has_output: bool, has_form: bool) -> str | None:
    """The stage that an event begins; "": none does; None: it changes nothing."""
    match event:
        case "tokenised":
            return "compile" if has_form else "queue"
        case "compiled":
            return "queue"
        case "admitted" | "resumed" | "first token":
            return "decode" if has_output else "prefill"
        case "preempted":
            return "preempted"
        case "engine died":
            return "restart"
        case "finished":
            return ""
        case _:
            return None
