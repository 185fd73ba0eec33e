"""What probes ask for."""

import httpx
import pytest
from server.served import Served

from octavo.server.options import ServerOptions

PROBED = ("/health", "/ping", "/v1/models", "/v1/models/tiny", "/metrics", "/version", "/load", "/requests", "/")


@pytest.mark.parametrize("path", [*PROBED, "/static/page.css", "/openapi.json"])
def test_a_head_is_that_of_the_get(http: httpx.Client, path: str) -> None:
    head, whole = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    fixed = ("content-length",) if path not in ("/metrics", "/requests") else ()
    for name in ("content-type", "x-content-type-options", *fixed):
        assert head.headers.get(name) == whole.headers.get(name)


def test_the_head_of_what_is_not_there(http: httpx.Client, served: Served) -> None:
    assert http.head("/nothing").status_code == 404
    assert http.head("/v1/models/nothing").status_code == 404
    assert http.head("/v1/completions").status_code == 405
    with httpx.Client(base_url=served.listen(ServerOptions(api_keys=("k",)))) as locked:
        assert locked.head("/health").status_code == 200
        assert locked.head("/v1/models").status_code == 401
        assert locked.head("/v1/models", headers={"x-api-key": "k"}).status_code == 200
    document = http.get("/openapi.json").json()
    assert not any("head" in operations for operations in document["paths"].values())
