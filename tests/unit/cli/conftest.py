"""A model that repeats what it reads, in place of the engine."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams


@dataclass
class Sample:
    index: int
    text: str
    delta: str = ""
    token_ids: list[int] = field(default_factory=lambda: [7, 8])
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


@dataclass
class Output:
    prompt: str | None
    outputs: list[Sample]
    error: str | None = None
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_prompt_tokens: int = 3
    num_cached_tokens: int = 0
    num_generated_tokens: int = 2


class Echo:
    """Stands for octavo.engine.llm.LLM. A prompt with "fail" in it fails; one with "refuse" raises."""

    made: ClassVar["list[Echo]"] = []

    def __init__(self, *, config: EngineConfig):
        self.config = config
        self.description = SimpleNamespace(sampling_defaults={"top_p": 0.9})
        self.params: list[SamplingParams] = []
        self.conversations: list[list[dict[str, str]]] = []
        self.closed = False
        self.on_word: Any = lambda: None
        Echo.made.append(self)

    def __enter__(self) -> "Echo":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Output]:
        self.params.append(params)
        return [
            Output(
                prompt, [Sample(i, f"<{prompt}>") for i in range(params.n)], "it failed" if "fail" in prompt else None
            )
            for prompt in prompts
        ]

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Output]:
        self.params.append(params)
        if "refuse" in prompt:
            raise RequestError("prompt refused")
        text = ""
        for word in f"you said {prompt}".split(" "):
            delta = word if not text else " " + word
            text += delta
            yield Output(prompt, [Sample(0, text, delta, finish_reason=None)])
            self.on_word()
        if "fail" in prompt:
            yield Output(prompt, [Sample(0, text)], "it failed")

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[Output]:
        self.conversations.append(list(messages))
        yield from self.stream(messages[-1]["content"], params)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> type[Echo]:
    """The class; its `made` lists the models that the command has made."""
    module = ModuleType("octavo.engine.llm")
    module.LLM = Echo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.engine.llm", module)
    monkeypatch.setattr(Echo, "made", [])
    return Echo
