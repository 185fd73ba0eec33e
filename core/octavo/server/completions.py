"""POST /v1/completions: prompts of every form continued, echoed and scored.

The choices of prompt i are i * n to i * n + n - 1. Offsets of tokens count from the beginning of the returned text.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import Prompt, TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import shown
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.server.answers import Choice, ChunkedAnswer, respond
from octavo.server.errors import ApiError, unsupported
from octavo.server.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.protocol import CompletionRequest, PromptField
from octavo.server.sampling import check_served, sampling_params
from octavo.server.service import Caller, Service
from octavo.server.structured import form_names

__all__ = ["create_completion", "prompts_of"]

MAX_PROMPTS = 2048  # of one request
DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    """Answer a request, streaming or whole."""
    return await respond(request, CompletionRequest, _prepare)


def prompts_of(field: PromptField, name: str = "prompt") -> list[Prompt]:
    """One prompt or many: a text, token ids, a list of texts or of lists of token ids.

    Raises:
        ApiError: there is none, or it is of no such form.

    """
    if isinstance(field, str):
        return [field]
    if not field:
        raise ApiError(400, f"{name} is empty; at least one token is needed", name)
    if len({type(item) for item in field}) > 1:
        raise ApiError(400, f"{name} mixes texts, token ids and lists; give one kind", name)
    if isinstance(field[0], int):
        return [field]  # type: ignore[list-item]
    if len(field) > MAX_PROMPTS:
        raise ApiError(400, f"{name} holds {len(field)} prompts; at most {MAX_PROMPTS} are taken at once", name)
    return list(field)  # type: ignore[arg-type]


async def _prepare(service: Service, request: Request, body: CompletionRequest) -> "_Completion":
    check_served(body)
    if body.suffix:
        raise unsupported("suffix", "is not served: text is continued at its end alone")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise ApiError(400, f"logprobs must be from 0 to {MAX_LOGPROBS}, got {shown(body.logprobs)}", "logprobs")
    recommended = service.engine.description.sampling_defaults
    max_tokens = recommended.get("max_tokens", DEFAULT_MAX_TOKENS) if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, recommended, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        params = params.but(prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
    prompts = [
        await service.tokenize(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            truncate=body.truncate_prompt_tokens,
            side=body.truncation_side,
            num_output=max_tokens,
        )
        for prompt in prompts_of(body.prompt)
    ]
    for prompt in prompts:
        service.check_length(prompt, body.max_tokens, request.url.path)
    texts = [""] * len(prompts)
    if body.echo:
        texts = await asyncio.to_thread(lambda: [_text_of(service, prompt) for prompt in prompts])
    caller = Caller.of(request, "cmpl", body.request_id)
    return _Completion(service, body, params, prompts, texts, caller)


def _text_of(service: Service, prompt: TokenizedPrompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return service.engine.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


@dataclass
class _Choice(Choice):
    """How far one sample has been told, and its logprobs."""

    logprobs: CompletionLogprobs | None = None


def _logprobs_of(
    service: Service, body: CompletionRequest, params: SamplingParams, prompt: TokenizedPrompt
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    return CompletionLogprobs(
        service.engine.tokenizer,
        [] if body.echo else prompt.token_ids,
        skip_special_tokens=params.skip_special_tokens,
        as_token_ids=bool(body.return_tokens_as_token_ids),
    )


class _Completion(ChunkedAnswer[CompletionRequest, _Choice]):
    """One request under way: its prompts, and what its answer is made of."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[TokenizedPrompt],
        texts: Sequence[str],
        caller: Caller,
    ) -> None:
        choices = [
            [_Choice(i * params.n + j, logprobs=_logprobs_of(service, body, params, prompt)) for j in range(params.n)]
            for i, prompt in enumerate(prompts)
        ]
        super().__init__(service, body, params, prompts, choices, caller, form_names(body), "text_completion")
        self._texts = texts

    def _whole_choice(
        self, place: int, choice: _Choice, output: RequestOutput, sample: CompletionOutput
    ) -> dict[str, Any]:
        wants = self._body.prompt_logprobs is not None
        piece = self._piece(place, choice, output, sample)
        return {**piece, "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if wants else None}

    def _pieces(
        self, place: int, choice: _Choice, output: RequestOutput, sample: CompletionOutput
    ) -> list[dict[str, Any]]:
        """What there is to tell: text, tokens where they show, or its end."""
        shows_tokens = choice.logprobs is not None or self._body.return_token_ids
        is_first = bool(self._body.echo) and not choice.is_begun
        is_news = len(sample.text) > choice.num_chars or sample.finish_reason is not None
        return [self._piece(place, choice, output, sample)] if is_news or shows_tokens or is_first else []

    def _piece(self, place: int, choice: _Choice, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """What a choice gained since it was last told."""
        text = sample.text[choice.num_chars :]
        token_ids = sample.token_ids[choice.num_tokens :]
        scored: list[Any] = [] if sample.logprobs is None else list(sample.logprobs[choice.num_tokens :])
        prompt_ids: list[int] = []
        is_first = not choice.is_begun
        choice.is_begun = True
        if self._body.echo and is_first:
            text = self._texts[place] + text
            if choice.logprobs is not None:
                prompt_ids, scored = output.prompt_token_ids, [*(output.prompt_logprobs or ()), *scored]
        choice.advance(sample)
        piece: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": choice.logprobs and choice.logprobs.take([*prompt_ids, *token_ids], scored),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            piece["token_ids"] = token_ids
            if is_first:
                piece["prompt_token_ids"] = output.prompt_token_ids
        return piece
