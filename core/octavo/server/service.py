"""What every endpoint asks of the engine: is it there, which model, tokens of a prompt, a stream of outputs."""

import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.history import Origin
from octavo.engine.inputs import Conversation, Prompt, TokenizedPrompt
from octavo.engine.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError, context_exceeded, not_found
from octavo.server.options import ServerOptions
from octavo.server.protocol import GenerationRequest
from octavo.server.tracing import trace_headers

__all__ = ["Caller", "Service", "usage_of"]

RETRY_SECONDS = 2  # after which a client may ask again while the engine loads
MAX_USER = 128  # characters of a user's name that count
NAME = re.compile(r"[\x21-\x7e]{1,128}")  # what a request may be called by its client

WHY_NOT_READY = {
    "loading": "the model is loading",
    "restarting": "the engine is starting again after a failure",
    "dead": "the engine has ended for good",
    "stopped": "the server is shutting down",
}


@dataclass(frozen=True)
class Caller:
    """Who asks, and under which name.

    Attributes:
        request_id: of the answer; the engine's requests are called by it too, with a number where there are several.
        created: seconds since 1970.
        received: when the request came, in seconds since 1970.
        max_wait: for how many seconds the request may wait from then on, by its x-request-timeout; None: any time.
        api_key: the place of the caller's key among the server's, or None where no key is asked for.
        path: of the endpoint.
        trace: headers of the trace that the request is part of.

    """

    request_id: str
    created: int
    received: float
    max_wait: float | None
    api_key: int | None
    path: str
    trace: Mapping[str, str]

    @classmethod
    def of(cls, request: Request, prefix: str, name: str | None = None) -> "Caller":
        """The caller of a request. What it calls itself, in the body or in x-request-id, is part of the name."""
        given = name or request.headers.get("x-request-id") or ""
        unique = uuid.uuid4().hex
        own = f"{given}-{unique[:8]}" if NAME.fullmatch(given) else unique
        received = request.scope.get("octavo.received", time.time())
        max_wait = _seconds(request.headers.get("x-request-timeout"), "x-request-timeout")
        place, path, trace = request.scope.get("octavo.api_key"), request.url.path, trace_headers(request.headers)
        return cls(f"{prefix}-{own}", int(received), received, max_wait, place, path, trace)

    def origin(self, user: str | None, timeout: float | None = None) -> Origin:
        """Where its requests come from, as the engine is told. `timeout` is as the body has it, and goes first."""
        tenant = "" if self.api_key is None else f"key-{self.api_key}"
        seconds = _seconds(timeout, "timeout") if timeout is not None else self.max_wait
        left = None if seconds is None else max(seconds - (time.time() - self.received), 0.0)
        return Origin((tenant, (user or "")[:MAX_USER]), self.received, left, self.path, self.trace)


def _seconds(given: str | float | None, name: str) -> float | None:
    """A number of seconds over 0, if any is given."""
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"{name} must be a number of seconds over 0, got {given!r:.40}", name)
    return seconds


class Service:
    """The engine as endpoints see it.

    Attributes:
        engine: behind all of them.
        options: of the server.
        model: the name that answers carry.
        created: seconds since 1970, of the model as clients list it.

    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.names = options.served_model_names or (engine.config.model.model,)
        self.model = self.names[0]
        self.created = int(time.time())

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.config.model.max_model_len or self.engine.description.max_position

    def check(self, model: str | None) -> None:
        """The engine is there and serves this model.

        Raises:
            ApiError: 503 or 404.

        """
        state = self.engine.state
        if state != "ready":
            headers = {"retry-after": str(RETRY_SECONDS)} if state in ("loading", "restarting") else {}
            raise ApiError(503, WHY_NOT_READY[state], headers=headers)
        self.check_model(model)

    def check_model(self, model: str | None) -> None:
        """Whether a model of this name is served, be the engine there or not.

        Raises:
            ApiError: 404.

        """
        if model is not None and model not in self.names:
            raise not_found(f"no model {model!r:.100} is served; there is {', '.join(self.names)}", "model")

    async def tokenize(
        self,
        prompt: Prompt | Conversation,
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        side: str | None = None,
        num_output: int = 0,
    ) -> TokenizedPrompt:
        """Token ids of a prompt, cut to `truncate` tokens; -1: to what fits beside `num_output` tokens.

        Raises:
            RequestError: it cannot be served.

        """
        tokenized = await self.engine.tokenize(
            prompt,
            add_special_tokens=add_special_tokens,
            max_tokens=self.max_model_len if truncate is None else None,
        )
        if truncate is None:
            return tokenized
        most = max(self.max_model_len - num_output, 1) if truncate == -1 else truncate
        if len(tokenized.token_ids) <= most:
            return tokenized
        ids = tokenized.token_ids
        return TokenizedPrompt(ids[:most] if side == "right" else ids[len(ids) - most :])

    def check_length(
        self, prompt: TokenizedPrompt, num_output: int | None, path: str, name: str = "max_tokens"
    ) -> None:
        """Whether the context holds a prompt and so many tokens of output, where a client asked for a number.

        A default is cut to what fits; what was asked for is refused.

        Raises:
            ApiError: 400, with both numbers.

        """
        limit, num_prompt = self.max_model_len, len(prompt.token_ids)
        if num_prompt > limit or (num_prompt == limit and num_output != 0):
            raise context_exceeded(path, limit, num_prompt, None, "prompt")
        if num_output is not None and num_prompt + num_output > limit:
            raise context_exceeded(path, limit, num_prompt, num_output, name)

    def generate(
        self, prompts: Sequence[TokenizedPrompt], params: SamplingParams, caller: Caller, request: GenerationRequest
    ) -> list[AsyncIterator[RequestOutput]]:
        """A stream of outputs for each prompt; see `AsyncEngine.generate`. Nothing runs before it is asked for."""
        names = [caller.request_id, *(f"{caller.request_id}-{i}" for i in range(1, len(prompts)))]
        salt = (request.cache_salt or "").encode()
        origin, priority = caller.origin(request.user, request.timeout), request.priority or 0
        return [
            self.engine.generate(prompt, params, request_id=name, priority=priority, salt=salt, origin=origin)
            for prompt, name in zip(prompts, names, strict=True)
        ]


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The tokens of a request, each prompt counted once."""
    num_prompt = sum(output.num_prompt_tokens for output in outputs)
    num_generated = sum(output.num_generated_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
