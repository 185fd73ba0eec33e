"""What the page at / asks for is there, it asks nobody else, and it obeys the API keys."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.served import Served

import octavo.server.page
from octavo.server.options import ServerOptions

FOLDER = Path(octavo.server.page.__file__).parent / "static"


@pytest.fixture(scope="module")
def locked(served: Served) -> Iterator[httpx.Client]:
    """A client, without its key, of a server that asks for one."""
    with httpx.Client(base_url=served.listen(ServerOptions(api_keys=("secret",))), timeout=60) as client:
        yield client


def test_the_page_is_whole_and_open(locked: httpx.Client) -> None:
    page = locked.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    references = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(references) >= 3
    for reference in references:
        assert locked.get(reference).status_code == 200, reference
    assert {path.name for path in FOLDER.iterdir()} == set(octavo.server.page.FILES)
    assert locked.get("/static/..%2Fpage.py").status_code == 404
    assert locked.get("/static/page.py").status_code == 404


def test_no_file_of_the_page_names_another_host() -> None:
    for path in FOLDER.iterdir():
        found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", path.read_text())
        assert [name for name in found if name != "http://www.w3.org/2000/svg"] == [], path.name
        assert not re.search(r"@import|\bimport\s*\(|\beval\b|\binnerHTML\b", path.read_text()), path.name


def test_every_element_that_the_script_asks_for_is_in_the_page() -> None:
    page, script = (FOLDER / "index.html").read_text(), (FOLDER / "page.js").read_text()
    asked = set(re.findall(r'(?:\$|show|canvasOf)\("([\w-]+)"', script))
    assert asked <= set(re.findall(r'id="([\w-]+)"', page))


def test_requests_need_a_key_and_show_figures_and_no_text(locked: httpx.Client) -> None:
    assert locked.get("/requests").status_code == 401
    assert locked.get("/requests/any").status_code == 401
    headers = {"authorization": "Bearer secret"}
    body = {"prompt": "a private matter", "max_tokens": 5, "ignore_eos": True, "user": "somebody"}
    name = locked.post("/v1/completions", json=body, headers=headers).json()["id"]
    listed = locked.get("/requests?limit=3", headers=headers)
    assert "private" not in listed.text
    assert "secret" not in listed.text
    assert listed.json()["data"][0]["id"] == name
    engine = listed.json()["engine"]
    assert engine["blocks"]["total"] == 256
    assert engine["totals"]["num_generated_tokens"] >= 5
    timeline = locked.get(f"/requests/{name}", headers=headers).json()
    events = [event["event"] for event in timeline["events"]]
    assert events[:4] == ["received", "tokenised", "queued", "admitted"]
    assert events[-1] == "finished"
    assert (timeline["user"], timeline["num_generated_tokens"]) == ("somebody", 5)
    assert locked.get("/requests/nobody", headers=headers).status_code == 404
    assert locked.get("/requests?limit=0", headers=headers).status_code == 400
