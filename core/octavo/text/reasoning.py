"""Models that think before they answer: the one told apart from the other as it comes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.text.tokenizer import Tokenizer

__all__ = [
    "REASONING_FORMATS",
    "ReasoningFormat",
    "ReasoningParser",
    "begins_inside",
    "detect_reasoning",
    "end_token",
    "num_reasoning_tokens",
]

NUM_TAIL_IDS = 16  # of a prompt, in which a template may have opened the reasoning


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family marks its reasoning.

    Attributes:
        name: as the setting reasoning_parser has it.
        start: what opens it.
        end: what closes it.
        always: whether an output begins with reasoning though nothing opens it.

    """

    name: str
    start: str
    end: str
    always: bool = False


REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
    )
}


def detect_reasoning(templates: Collection[str]) -> ReasoningFormat | None:
    """The format that a model's chat templates show; None: none that is known."""
    return REASONING_FORMATS["think"] if any("</think>" in template for template in templates) else None


def begins_inside(found: ReasoningFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the output goes on with reasoning that the prompt has opened."""
    tail = tokenizer.decode(prompt_ids[-NUM_TAIL_IDS:], skip_special_tokens=False)
    opened, closed = tail.rfind(found.start), tail.rfind(found.end)
    return opened > closed or (found.always and closed < 0)


def end_token(found: ReasoningFormat, tokenizer: Tokenizer) -> int | None:
    """The token that closes the reasoning, where one alone does."""
    ids = tokenizer.encode(found.end, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def num_reasoning_tokens(found: ReasoningFormat, tokenizer: Tokenizer, token_ids: Sequence[int], reasoning: str) -> int:
    """How many of an output's tokens are its reasoning, of which `reasoning` is the text; the markers count.

    Where no single token ends it, those of the text are counted anew.
    """
    if not reasoning:
        return 0
    end = end_token(found, tokenizer)
    if end is None:
        return len(tokenizer.encode(reasoning, add_special_tokens=False))
    return next((i + 1 for i, token_id in enumerate(token_ids) if token_id == end), len(token_ids))


class ReasoningParser:
    """Splits one output into reasoning and what follows it. White space at both ends of the reasoning is not told.

    Args:
        found: the format.
        inside: whether the output begins within the reasoning.

    """

    def __init__(self, found: ReasoningFormat, *, inside: bool) -> None:
        self._format = found
        self._buffer = ""
        self._state = "inside" if inside else "before"
        self._is_begun = False
        self._is_told = False  # whether any reasoning was

    def add(self, text: str) -> tuple[str, str]:
        """What new text of the output gives: (reasoning, content)."""
        self._buffer += text
        if not self._is_begun and self._state in ("before", "inside"):
            rest = self._buffer.lstrip()
            if len(rest) < len(self._format.start) and self._format.start.startswith(rest):
                return "", ""
            if rest.startswith(self._format.start):
                self._buffer, self._state = rest[len(self._format.start) :], "inside"
            elif self._state == "before":
                self._state = "after"
            self._is_begun = True
        reasoning = self._reasoning() if self._state == "inside" else ""
        if self._state == "closed":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "after"
        content = ""
        if self._state == "after":
            content, self._buffer = self._buffer, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held back when the output ended, but for the beginning of a marker that was cut."""
        held, self._buffer = self._buffer, ""
        marker = self._format.end if self._state == "inside" else self._format.start
        if self._state != "after" and len(rest := held.strip()) > 1 and marker.startswith(rest):
            held = ""
        return (held.rstrip(), "") if self._state == "inside" else ("", held)

    def _reasoning(self) -> str:
        end = self._format.end
        if not self._is_told:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(end)
        if at >= 0:
            told, self._buffer, self._state = self._buffer[:at].rstrip(), self._buffer[at + len(end) :], "closed"
        else:
            longest = min(len(end) - 1, len(self._buffer))
            held = next((num for num in range(longest, 0, -1) if self._buffer.endswith(end[:num])), 0)
            told = self._buffer[: len(self._buffer) - held].rstrip()
            self._buffer = self._buffer[len(told) :]
        self._is_told = self._is_told or bool(told)
        return told
