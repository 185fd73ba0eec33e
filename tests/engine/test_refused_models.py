"""What no program serves is refused in one line, from Python and from the command line alike, before it is loaded."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.tiny_llm import greedy
from repo.sources import text_of
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.cli.main import main
from octavo.errors import ModelError, RequestError

Edit = Callable[[Path], None]
MANUAL = Path("docs/models.md")


def config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        held = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(held)
        save_file(held, path, {"format": "pt"})

    return edit


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
# What is done to a sound model -> what the line says that was found, and what was expected.
CASES: dict[str, tuple[Edit, str, str]] = {
    "encoder-decoder": (
        config(model_type="t5", is_encoder_decoder=True),
        "an encoder-decoder (t5)",
        "only decoders are served",
    ),
    "model type": (
        config(model_type="megalomodel"),
        "model type 'megalomodel' is not supported",
        "supported are arcee, ",
    ),
    "rope": (
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "rope scaling 'spiral' is not known",
        "known are default, linear",
    ),
    "missing": (
        tensors(lambda held: held.pop(K_PROJ)),
        "tensor model.layers.1.self_attn.k_proj is missing",
        "to fill layers.1.attn.qkv [128, 64]",
    ),
    "extra": (
        tensors(lambda held: held.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)})),
        "1 of 22 tensors have no place",
        "21 were expected",
    ),
    "shape": (config(intermediate_size=95), "has shape [96, 64]", "expected is [95, 64]"),
}


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_refused_alike_from_everywhere(case: str, folder: Path, capsys, monkeypatch) -> None:
    edit, found, expected = CASES[case]
    edit(folder)
    with pytest.raises(ModelError) as caught:
        LLM(folder, num_threads=1)
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line and len(line) < 2000
    assert found in line and expected in line
    monkeypatch.setattr("octavo.executor.local.LocalExecutor.__init__", None)  # nothing is loaded
    for command in (["generate", str(folder), "hello"], ["chat", str(folder)]):
        assert main(command) == 1
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", f"octavo {command[0]}: error: {line}\n")
    assert main(["info", "--model", str(folder)]) == 1
    assert capsys.readouterr().err == f"octavo info: error: {line}\n"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no users here') }}", "the chat template refuses these messages: no users here"),
        ("{% for message in messages %}{{ message", "the chat template cannot be compiled: "),
        ("{{ messages[0].nothing.at_all }}", "the chat template refuses these messages: "),
        (None, "the model has no chat template"),
    ],
)
def test_a_template_that_fails_ends_its_request_alone(folder: Path, template, said: str, capsys, monkeypatch) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    message = [{"role": "user", "content": "hello"}]
    with LLM(folder, dtype="float32", num_threads=1) as llm:
        (output,) = llm.chat(message, greedy(2))
        assert output.error is not None and said in output.error and "\n" not in output.error
        with pytest.raises(RequestError) as caught:
            next(llm.stream_chat(message, greedy(2)))
        assert str(caught.value) == output.error
        (text,) = llm.generate("hello", greedy(2))
        assert text.error is None
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(folder), "--num-threads", "1"]) == 1
    assert capsys.readouterr().err == f"octavo chat: error: {output.error}\n"


def test_the_manual_quotes_these_lines() -> None:
    manual = text_of(MANUAL)
    for case, (_, found, expected) in CASES.items():
        assert found in manual and expected.removesuffix("arcee, ").strip() in manual, case
