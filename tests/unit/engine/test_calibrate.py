"""Calibration in a worker: whose text, what is refused, and a model that cannot be run over it loads all the same."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.platforms import ToyPlatform
from doubles.tiny_models import Tiny, base, folder_files

from octavo.config import EngineConfig
from octavo.engine.settle import settle
from octavo.errors import ConfigError
from octavo.executor import calibrate as module
from octavo.executor.calibrate import calibrator
from octavo.hardware.resolve import OpResolver
from octavo.model.describe import describe_native, load_weights
from octavo.model.description import NativeModel
from octavo.model.files import resolve_model
from octavo.model.precision import Precision
from octavo.model.slots import slots
from octavo.testing.bench import Bench


class TakesBoth(ToyPlatform):
    """Multiplies by quantised weights, with the reference's op."""

    def weight_formats(self) -> tuple[str, ...]:
        return ("int8", "int4")


@pytest.fixture(scope="module")
def model() -> Iterator[NativeModel]:
    """A tiny model with a tokenizer of bytes."""
    with Bench("cpu") as bench:
        yield describe_native(resolve_model(str(bench.model.folder), progress=False), 64)


def importance(model: NativeModel, **settings: Any) -> Mapping[str, torch.Tensor]:
    """What the weights of a model of 4 bits are fitted to, as a worker asks for it."""
    platform, told = TakesBoth(), []
    config = settle(EngineConfig.of(quantization="int4", dtype="float32", **settings), model, platform)
    ask = calibrator(config, model, platform, OpResolver(platform), torch.float32, progress=False)

    def asked(plan: Any, checkpoint: Any) -> Mapping[str, torch.Tensor]:
        told.append(ask(plan, checkpoint))
        return told[-1]

    precision = Precision("int4", platform.weight_formats())
    load_weights(
        model, dtype=torch.float32, device=platform.device, progress=False, precision=precision, calibrate=asked
    )
    return told[0]


def text_of(tmp_path: Path, text: str) -> str:
    file = tmp_path / "text"
    file.write_text(text)
    return str(file)


def test_every_matrix_is_fitted(model: NativeModel, tmp_path: Path) -> None:
    own = importance(model)
    assert {slot.name for slot in slots(model.spec) if slot.role == "layer"} <= own.keys()
    again = importance(model)
    assert all(torch.equal(own[name], again[name]) for name in own)
    other = importance(model, calibration_file=text_of(tmp_path, "0123456789 " * 100))
    assert not torch.equal(own["layers.0.attn.qkv"], other["layers.0.attn.qkv"])


def test_a_start_with_shorter_pieces_leaves_nothing_to_the_next(model: NativeModel) -> None:
    """Weights would else depend on which start came first."""
    short = importance(model, max_model_len=32)
    assert not torch.equal(short["layers.0.attn.qkv"], importance(model)["layers.0.attn.qkv"])


def test_a_text_that_cannot_serve(model: NativeModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"calibration_file .* has \d+ tokens of this model, at least 512 are needed"):
        importance(model, calibration_file=text_of(tmp_path, "short"))
    with pytest.raises(ConfigError, match=r"cannot read calibration_file .*none \(No such file or directory\)"):
        importance(model, calibration_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is empty"):
        importance(model, calibration_file=text_of(tmp_path, ""))


@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_a_text_for_weights_that_need_none(quantization: str, model: NativeModel, tmp_path: Path) -> None:
    config = EngineConfig.of(quantization=quantization, calibration_file=text_of(tmp_path, "text"))
    with pytest.raises(ConfigError, match=f"calibration_file is set and quantization is {quantization}: int4 alone"):
        settle(config, model, TakesBoth())


def test_a_model_that_cannot_be_run_over_a_text(
    model: NativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(module, "input_squares", fails)
    assert importance(model, calibration_file=text_of(tmp_path, "another text " * 100)) == {}
    assert "weights become int4 without calibration, which costs quality: no such kernel at all" in caplog.text


def test_a_model_without_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Tiny("Llama", base(tie_word_embeddings=True)).save(tmp_path)
    assert importance(describe_native(folder_files(tmp_path), 64)) == {}
    assert "weights become int4 without calibration, which costs quality: " in caplog.text


def test_inputs_that_overflow_count_alike(
    model: NativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"layers.0.attn.qkv": torch.tensor([1.0, torch.inf]), "layers.0.attn.o": torch.ones(2)}
    monkeypatch.setattr(module, "input_squares", lambda *_, **__: found)
    monkeypatch.setattr("octavo.model.describe.read_weights", lambda *_, **__: {})
    assert importance(model, calibration_file=text_of(tmp_path, "a third text " * 100)).keys() == {"layers.0.attn.o"}
    assert "inputs of layers.0.attn.qkv overflow torch.float32: its columns count alike" in caplog.text
