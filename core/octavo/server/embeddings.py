"""POST /v1/embeddings: prompts to vectors."""

import asyncio
import base64
from array import array
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.outputs import EmbeddingOutput
from octavo.server.body import parse_body
from octavo.server.completions import prompts_of
from octavo.server.errors import ApiError
from octavo.server.protocol import EmbeddingRequest
from octavo.server.service import Caller, Service
from octavo.server.streaming import while_connected

__all__ = ["create_embedding"]


async def create_embedding(request: Request) -> Response:
    """A vector for each input, as numbers or as base64 of 32-bit floats, the lower byte first."""
    service: Service = request.app.state.service
    body = await parse_body(request, EmbeddingRequest)
    service.check(body.model)
    caller = Caller.of(request, "embd", body.request_id)
    outputs = await while_connected(request, _embed_all(service, body, caller))
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    answer = {
        "id": caller.request_id,
        "object": "list",
        "created": caller.created,
        "model": service.model,
        "data": [
            {"object": "embedding", "index": i, "embedding": _shown(output, body)} for i, output in enumerate(outputs)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _embed_all(service: Service, body: EmbeddingRequest, caller: Caller) -> list[EmbeddingOutput]:
    async def embed(prompt: Any, request_id: str) -> EmbeddingOutput:
        tokenized = await service.tokenize(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            truncate=body.truncate_prompt_tokens,
            side=body.truncation_side,
        )
        return await service.engine.embed(
            tokenized,
            body.pooling,
            body.normalize is not False,
            request_id=request_id,
            priority=body.priority or 0,
            origin=caller.origin(body.user),
        )

    prompts = prompts_of(body.input, "input")
    tasks = [asyncio.ensure_future(embed(prompt, f"{caller.request_id}-{i}")) for i, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shown(output: EmbeddingOutput, body: EmbeddingRequest) -> list[float] | str:
    vector = output.embedding or []
    if body.dimensions is not None and body.dimensions != len(vector):
        raise ApiError(400, f"dimensions is {body.dimensions}; this model's vectors have {len(vector)}", "dimensions")
    return base64.b64encode(array("f", vector).tobytes()).decode() if body.encoding_format == "base64" else vector
