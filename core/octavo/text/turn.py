"""An assistant's turn as it comes: reasoning, content, tool calls."""

from dataclasses import dataclass, field

from octavo.text.reasoning import ReasoningParser
from octavo.text.tools import ToolCallDelta, ToolParser

__all__ = ["Turn", "TurnDelta"]


@dataclass
class TurnDelta:
    """What a turn gained."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Turn:
    """Takes the text of one output, as it comes or at once."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was written to its end."""
        return self._tools is not None and self._tools.num_calls > 0

    def add(self, text: str, *, is_over: bool = False) -> TurnDelta:
        """What new text gives; with `is_over` also what was held back."""
        delta = TurnDelta(content=text)
        if self._reasoning is not None:
            delta.reasoning, delta.content = self._reasoning.add(text)
            if is_over:
                reasoning, content = self._reasoning.finish()
                delta.reasoning, delta.content = delta.reasoning + reasoning, delta.content + content
        if self._tools is not None:
            found = self._tools.add(delta.content)
            delta.content, delta.calls = found.content, found.calls
            if is_over:
                found = self._tools.finish()
                delta.content, delta.calls = delta.content + found.content, delta.calls + found.calls
        return delta
