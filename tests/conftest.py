"""What every test gets: settings of the machine's user left out, no hub, and the demo model where it is asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from octavo.config import ENVIRONMENT_PREFIX, settings
from octavo.model.files import resolve_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Two slow cores share the work, so an example may take its time; a failing one is printed to be run again.
hypothesis.settings.register_profile("octavo", deadline=None, print_blob=True)
hypothesis.settings.load_profile("octavo")


@pytest.fixture(autouse=True, scope="session")
def plain_environment() -> Iterator[None]:
    """No setting of Octavo comes from the environment and no hub is asked, here and in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        for setting in settings():
            patch.delenv(ENVIRONMENT_PREFIX + setting.name.upper(), raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def calibrations_of_ones_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests find on models that live for a test is not kept in the user's cache folder."""
    folder = tmp_path_factory.mktemp("calibrations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.model.calibration.cache_folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The demo model's GGUF file, fetched on first use."""
    return resolve_model("demo", progress=False).path


@pytest.fixture(scope="session")
def demo_reference(demo_file: Path) -> "LlamaForCausalLM":
    """The demo model in transformers, float32."""
    from doubles.demo_reference import demo_in_transformers

    return demo_in_transformers(demo_file)
