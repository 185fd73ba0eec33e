"""POST /tokenize and /detokenize: what the model reads of a text or a conversation, and back."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.body import parse_body
from octavo.server.chat import conversation_of
from octavo.server.errors import ApiError
from octavo.server.protocol import DetokenizeRequest, TokenizeRequest
from octavo.server.service import Service
from octavo.server.streaming import while_connected

__all__ = ["detokenize", "tokenize"]


async def tokenize(request: Request) -> Response:
    """Token ids of `prompt`, or of `messages` through the chat template."""
    service: Service = request.app.state.service
    body = await parse_body(request, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt" if body.messages is None else "messages")
    token_ids = await while_connected(request, _token_ids(service, body))
    answer = {
        "count": len(token_ids),
        "max_model_len": service.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.engine.tokenizer.token_text(token_id) for token_id in token_ids]
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        return (await service.engine.tokenize(conversation_of(service, body, body.tools))).token_ids
    if not body.prompt:  # is no prompt for the model, but has its tokens all the same
        return service.engine.tokenizer.encode("", add_special_tokens=body.add_special_tokens is not False)
    special = body.add_special_tokens is not False
    return (await service.engine.tokenize(body.prompt, add_special_tokens=special)).token_ids


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens literally."""
    service: Service = request.app.state.service
    body = await parse_body(request, DetokenizeRequest)
    service.check_model(body.model)
    try:
        text = await asyncio.to_thread(service.engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
    except RequestError as error:
        raise ApiError(400, str(error), "tokens") from error
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
