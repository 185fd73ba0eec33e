"""A server over the tiny model, and clients of it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from doubles.tiny_llm import write_tiny_llm
from openai import OpenAI
from server.served import SETTINGS, Served

from octavo import LLM
from octavo.server.options import ServerOptions


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random llama of two layers, 401 tokens and 512 positions."""
    folder = tmp_path_factory.mktemp("tiny_llm")
    write_tiny_llm(folder)
    return folder


@pytest.fixture(scope="session")
def served(tiny_folder: Path) -> Iterator[Served]:
    """The server that tests share; they leave it without requests."""
    served = Served(tiny_folder)
    try:
        yield served.ready()
    finally:
        served.close()


@pytest.fixture(scope="session")
def http(served: Served) -> Iterator[httpx.Client]:
    """A plain client of it."""
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def openai(served: Served) -> Iterator[OpenAI]:
    """OpenAI's client of it; it repeats nothing, so that a status is seen as it is."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def agents_url(served: Served) -> str:
    """The same model, served as one that thinks before it speaks and calls tools."""
    return served.listen(
        ServerOptions(served_model_names=("tiny",), tool_parser="hermes", reasoning_parser="deepseek_r1")
    )


@pytest.fixture(scope="session")
def agents(agents_url: str) -> Iterator[httpx.Client]:
    """A plain client of that."""
    with httpx.Client(base_url=agents_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def offline(tiny_folder: Path) -> Iterator[LLM]:
    """The same model offline, under the same settings."""
    with LLM(tiny_folder, **SETTINGS) as llm:
        yield llm
