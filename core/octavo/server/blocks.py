"""Answers of one turn that is told in blocks, each after the other: reasoning, texts and tool calls."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from octavo.engine.inputs import TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.answers import Answer, renamed
from octavo.server.protocol import GenerationRequest
from octavo.server.service import Caller, Service
from octavo.server.streaming import named_event
from octavo.server.turns import Turns
from octavo.text.turn import TurnDelta

__all__ = ["Block", "BlockAnswer", "Step"]

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of a turn.

    Attributes:
        index: its place in the turn.
        kind: what it is.
        text: so far; of a call, its arguments.
        name: of the tool, for a call.
        call_id: of a call.

    """

    index: int
    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""


class Step(NamedTuple):
    """What happens to a block. `text` is what it grows by."""

    what: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class _Blocks:
    """Cuts a turn into its blocks as it comes. A turn of nothing is one empty text."""

    def __init__(self, *, with_reasoning: bool) -> None:
        self.all: list[Block] = []
        self._with_reasoning = with_reasoning

    def take(self, delta: TurnDelta, *, is_over: bool) -> list[Step]:
        """What a delta does to them."""
        steps: list[Step] = []
        if delta.reasoning and self._with_reasoning:
            self._grow(steps, "reasoning", delta.reasoning)
        for part in delta.parts:
            if isinstance(part, str):
                self._grow(steps, "text", part)
                continue
            if part.name is not None:
                self._begin(steps, "call", name=part.name, call_id=part.id or "")
            if part.arguments:
                self._grow(steps, "call", part.arguments)
        if is_over:
            if not self.all:
                self._begin(steps, "text")
            self._end(steps)
        return steps

    def _grow(self, steps: list[Step], kind: Kind, text: str) -> None:
        if not self.all or self.all[-1].kind != kind:
            self._begin(steps, kind)
        self.all[-1].text += text
        steps.append(Step("grow", self.all[-1], text))

    def _begin(self, steps: list[Step], kind: Kind, name: str = "", call_id: str = "") -> None:
        self._end(steps)
        self.all.append(Block(len(self.all), kind, name=name, call_id=call_id))
        steps.append(Step("begin", self.all[-1]))

    def _end(self, steps: list[Step]) -> None:
        if self.all:
            steps.append(Step("end", self.all[-1]))


class BlockAnswer(Answer):
    """A turn under way. What a protocol's events and whole answers look like is up to its own class.

    Args:
        service: that serves it.
        asked: what of the request all protocols have.
        params: of the one sample.
        prompt: that it follows.
        turns: of the request.
        caller: whose it is.
        names: see `Answer`.
        with_reasoning: whether reasoning is told.

    """

    def __init__(
        self,
        service: Service,
        asked: GenerationRequest,
        params: SamplingParams,
        prompt: TokenizedPrompt,
        turns: Turns,
        caller: Caller,
        names: Mapping[str, str],
        *,
        with_reasoning: bool,
    ) -> None:
        self.caller = caller
        self.names = names
        self._service = service
        self._asked = asked
        self._params = params
        self._prompt = prompt
        self._turn = turns.begin()
        self._found = _Blocks(with_reasoning=with_reasoning)
        self._blocks = self._found.all
        self._num_chars = 0  # that were told

    @abstractmethod
    def _begun(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The events before the first block."""

    @abstractmethod
    def _told(self, step: Step) -> list[dict[str, Any]]:
        """The events of a step."""

    @abstractmethod
    def _ended(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The events after the last block."""

    @abstractmethod
    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        """The whole answer, when all blocks are there."""

    def _read(self, sample: CompletionOutput) -> None:
        """A sample has grown; its blocks are told after this."""

    def _encode(self, data: dict[str, Any]) -> bytes:
        return named_event(data)

    async def whole(self) -> dict[str, Any]:
        output: RequestOutput | None = None
        with renamed(self.names):
            async for output in self._outputs():  # noqa: B007
                pass
        assert output is not None
        [sample] = output.outputs
        self._read(sample)
        self._found.take(self._turn.add(sample.text, is_over=True), is_over=True)
        return self._answer(output)

    async def stream(self) -> AsyncGenerator[bytes]:
        with renamed(self.names):
            async for output in self._outputs():
                events = self._events(output)
                if events:
                    yield b"".join(map(self._encode, events))

    def _events(self, output: RequestOutput) -> list[dict[str, Any]]:
        """What the turn gained."""
        [sample] = output.outputs
        self._read(sample)
        gained = self._turn.add(sample.text[self._num_chars :], is_over=output.finished)
        self._num_chars = len(sample.text)
        has_begun = bool(self._blocks)
        steps = self._found.take(gained, is_over=output.finished)
        events = self._begun(output) if steps and not has_begun else []
        for step in steps:
            events += self._told(step)
        return events + self._ended(output) if output.finished else events

    def _outputs(self) -> AsyncIterator[RequestOutput]:
        return self._service.generate([self._prompt], self._params, self.caller, self._asked)[0]
