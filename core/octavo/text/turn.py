"""An assistant's turn as it comes: reasoning, content, tool calls."""

from dataclasses import dataclass

from octavo.text.reasoning import ReasoningParser
from octavo.text.tools import Part, ToolDelta, ToolParser

__all__ = ["Turn", "TurnDelta"]


@dataclass
class TurnDelta(ToolDelta):
    """What a turn gained: first reasoning, then content and calls in their order."""

    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts)


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
        reasoning, content = "", text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.add(text)
            if is_over:
                rest, held = self._reasoning.finish()
                reasoning, content = reasoning + rest, content + held
        parts: list[Part] = [content] if content else []
        if self._tools is not None:
            parts = self._tools.add(content).parts
            if is_over:
                parts += self._tools.finish().parts
        return TurnDelta(parts, reasoning)
