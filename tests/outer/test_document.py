"""The OpenAPI document is true: whatever it allows is answered as it says, and by no fault of the server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from jsonschema import Draft202012Validator
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server.served import Served

from octavo.server.app import ROUTES
from octavo.server.options import ServerOptions
from octavo.server.shapes import SHAPES

HELLO = [{"role": "user", "content": "Hello"}]


def no_fault_of_the_server(context: Any, answer: Any, case: Any) -> None:
    """A request that allows itself no time to wait is late; nothing else that is sent is the server's fault."""
    assert answer.status_code < 500 or (answer.status_code == 504 and "timeout" in answer.text), answer.text


CHECKS = [
    no_fault_of_the_server,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    allow_header_conformance,
]
SETTINGS = hypothesis.settings(
    max_examples=80,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def fuzzed(tiny_folder: Path) -> Iterator[Served]:
    """A server whose outputs are short, since what is sent to it asks for anything."""
    served = Served(tiny_folder, ServerOptions(max_body_bytes=1 << 20), max_model_len=64)
    try:
        yield served.ready()
    finally:
        served.close()


@pytest.fixture(scope="module")
def document(fuzzed: Served) -> Any:
    """Its document, as schemathesis reads it."""
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


def test_every_route_is_described() -> None:
    assert {(method, path.replace(":path}", "}")) for method, path, *_ in ROUTES} == set(SHAPES)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), SHAPES, ids=lambda part: part)
def test_whatever_is_sent_gets_an_answer_of_the_document(
    fuzzed: Served, document: Any, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    operation = document[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and not (operation.body or operation.query):
        mode = schemathesis.GenerationMode.POSITIVE  # nothing of it can be wrong

    @SETTINGS
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.call_and_validate(timeout=60, checks=CHECKS)

    send()
    assert fuzzed.engine.state == "ready"


def test_all_of_it_left_the_engine_whole_and_empty(fuzzed: Served) -> None:
    fuzzed.wait_until(fuzzed.is_idle)
    assert fuzzed.engine.num_restarts == 0


GOOD: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
    (
        "POST",
        "/v1/completions",
        {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3, "logprobs": 2, "echo": True, "return_token_ids": True},
    ),
    ("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 2, "prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3}),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 3, "instructions": "Be short.", "user": "me"}),
    ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 3}),
    ("POST", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("POST", "/v1/embeddings", {"input": ["Hello", "you"], "pooling": "last"}),
    ("POST", "/v1/embeddings", {"input": "Hello", "encoding_format": "base64"}),
    ("POST", "/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": HELLO}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/{name}", {}),
    ("GET", "/requests", {}),
    ("GET", "/requests/{request_id}", {}),
    ("GET", "/health", {}),
    ("GET", "/ping", {}),
    ("POST", "/ping", {}),
    ("GET", "/version", {}),
    ("GET", "/load", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), GOOD, ids=lambda part: part if isinstance(part, str) else None)
def test_good_requests_get_the_documents_answers(
    http: httpx.Client, method: str, path: str, body: dict[str, Any]
) -> None:
    """What a fuzzer seldom sends: requests that are served, and so have answers with everything in them."""
    name = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1}).json()["id"]
    url = path.format(name="tiny", request_id=name)
    answer = http.request(method, url, json=body if method == "POST" else None)
    assert answer.status_code == 200, answer.text
    document = http.get("/openapi.json").json()
    operation = document["paths"][path][method.lower()]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": document["components"]}).validate(answer.json())
    named = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    assert set(answer.json()) <= set(named["properties"]), "the answer has what the document does not"


def test_keys_are_described_where_they_are_asked_for(served: Served) -> None:
    url = served.listen(ServerOptions(api_keys=("secret",)))
    with httpx.Client(base_url=url, headers={"authorization": "Bearer secret"}, timeout=60) as http:
        document = http.get("/openapi.json").json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    open_paths = {path for path, methods in document["paths"].items() if "security" not in str(methods)}
    assert open_paths == {"/", "/static/{name}", "/health", "/ping", "/version", "/metrics"}
