"""Calibration: which text, what it finds on a model, and how that is kept for the next start."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.family_cases import CASES
from doubles.platforms import ToyPlatform
from doubles.tiny_models import folder_files

from octavo.errors import ConfigError
from octavo.hardware.resolve import OpResolver
from octavo.model import calibration as module
from octavo.model.calibration import NUM_PIECES, PIECE_LEN, Calibration, calibration_text, cut
from octavo.model.describe import describe_native, load_weights
from octavo.model.input_squares import input_squares
from octavo.model.precision import Precision
from octavo.model.slots import slots

CPU = torch.device("cpu")
PIECES = [[(7 * i + 11 * n) % 60 + 3 for i in range(24)] for n in range(3)]
FOUND = {"layers.0.attn.qkv": torch.tensor([1.0, 0.0, 2.5])}


# ---- the text


def test_a_text_ships_with_the_package() -> None:
    text = calibration_text(None)
    assert len(text) > 10_000
    assert "\r" not in text


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("Größe", encoding="utf-8")
    assert calibration_text(str(file)) == "Größe"
    file.write_text(" \n")
    with pytest.raises(ConfigError, match=r"calibration_file .*text is empty; name a text of at least 512 tokens"):
        calibration_text(str(file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read calibration_file .*; name a text in UTF-8, or unset it"):
        calibration_text(str(file))
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot read calibration_file .* \((No such file|Is a directory)"):
            calibration_text(str(missing))


def test_a_text_that_is_too_long_is_refused_before_it_takes_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "text"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"calibration_file .*text is over 16 MiB, .*; name a part of it"):
        calibration_text(str(file))
    file.write_bytes(b"one\r\ntwo")
    assert calibration_text(str(file)) == "one\ntwo"


def test_pieces_lie_at_even_distances() -> None:
    ids = range(100_000)
    pieces = cut(ids, None, 8192)
    assert len(pieces) == NUM_PIECES
    assert all(piece == list(range(piece[0], piece[0] + PIECE_LEN)) for piece in pieces)
    assert (pieces[0][0], pieces[-1][-1]) == (0, 99_999)
    assert {len(piece) for piece in cut(ids, None, 48)} == {48}
    assert [len(piece) for piece in cut(range(1100), "mine", 8192)] == [512, 512]
    assert cut(range(100), None, 8192) == [list(range(100))]  # what ships is taken as it is


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ConfigError, match="calibration_file mine has 511 tokens of this model, at least 512"):
        cut(range(511), "mine", 8192)


# ---- what is found


def found_on(case: str, folder: Path) -> tuple[Any, Mapping[str, torch.Tensor]]:
    CASES[case].save(folder)
    description = describe_native(folder_files(folder), 64)
    asked = []

    def calibrate(plan: Any, checkpoint: Any) -> Mapping[str, torch.Tensor]:
        asked.append(
            input_squares(
                description,
                plan,
                checkpoint,
                PIECES,
                dtype=torch.float32,
                device=CPU,
                resolver=OpResolver(ToyPlatform()),
                block_size=16,
                progress=False,
            )
        )
        return asked[-1]

    both = ("int8", "int4")
    for setting in ("int8", "none", "auto"):
        load_weights(
            description,
            dtype=torch.float32,
            device=CPU,
            progress=False,
            precision=Precision(setting, both),  # type: ignore[arg-type]
            calibrate=calibrate,
        )
    assert not asked  # they need none
    load_weights(
        description,
        dtype=torch.float32,
        device=CPU,
        progress=False,
        precision=Precision("int4", both),
        calibrate=calibrate,
    )
    assert len(asked) == 1
    return description, asked[0]


@pytest.mark.parametrize("case", ["llama-biases-head-dim", "gpt_neox", "gpt2", "opt", "qwen2_moe", "deepseek_v3-yarn"])
def test_every_matrix_of_4_bits_has_its_columns(case: str, tmp_path: Path) -> None:
    """Also those of experts, biases, other residuals, learned positions and latent attention."""
    description, found = found_on(case, tmp_path)
    wanted = {slot.name: slot.shape[-1] for slot in slots(description.spec) if slot.role in ("layer", "down")}
    assert {name: len(squares) for name, squares in found.items() if name in wanted} == wanted
    assert all(bool((squares.isfinite() & (squares >= 0)).all()) for squares in found.values())


def test_squares_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    _, found = found_on("llama-rope-llama3-tied", tmp_path)
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[[Any, Any], None]:
        def hook(_: Any, given: Any) -> None:
            seen[name] = given[0].flatten(0, 1).square().mean(0)

        return hook

    for i, layer in enumerate(model.model.layers):
        names = {"attn.qkv": layer.self_attn.q_proj, "attn.o": layer.self_attn.o_proj}
        names |= {"mlp.up": layer.mlp.up_proj, "mlp.down": layer.mlp.down_proj}
        for name, part in names.items():
            part.register_forward_pre_hook(note(f"layers.{i}.{name}"))
    with torch.no_grad():
        model(torch.tensor(PIECES))
    assert seen.keys() == found.keys()
    for name, squares in seen.items():
        torch.testing.assert_close(found[name], squares, rtol=1e-3, atol=1e-6)


# ---- what is kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "calibration"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def taken(model: Path, text: str = "text", dtype: torch.dtype = torch.float32) -> tuple[Mapping[str, Any], bool]:
    """What a calibration says, and whether it had to find it."""
    calls = []

    def find() -> dict[str, torch.Tensor]:
        calls.append(None)
        return FOUND

    squares = Calibration([model], text, dtype).squares(find)
    assert squares.keys() == FOUND.keys()
    assert all(torch.equal(squares[name], FOUND[name]) for name in FOUND)
    return squares, bool(calls)


def test_the_second_start_finds_what_the_first_one_left(cache: Path, model: Path) -> None:
    assert taken(model)[1]
    assert not taken(model)[1]
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]


def test_another_text_model_or_dtype_is_another(cache: Path, model: Path) -> None:
    taken(model)
    assert taken(model, text="other")[1]
    assert taken(model, dtype=torch.bfloat16)[1]
    (model / "model.safetensors").write_bytes(b"weights, other ones")
    assert taken(model)[1]
    assert taken(model / "model.safetensors")[1]  # a file alone
    assert len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("broken", ["empty", "cut", "garbage", "nan", "other dtype"])
def test_a_broken_file_is_made_anew(broken: str, cache: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import save

    taken(model)
    (file,) = cache.iterdir()
    contents = {
        "empty": b"",
        "cut": file.read_bytes()[:-4],
        "garbage": b"\xff" * 100,
        "nan": save({"layers.0.attn.qkv": torch.tensor([1.0, float("nan")])}),
        "other dtype": save({"layers.0.attn.qkv": torch.zeros(3, dtype=torch.int64)}),
    }
    file.write_bytes(contents[broken])
    assert taken(model)[1]
    assert "is broken" in caplog.text
    assert not taken(model)[1]


def test_a_folder_that_cannot_be_written(cache: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    assert taken(model)[1]
    assert "calibration is not kept for the next start" in caplog.text


def test_no_cache_folder(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from octavo.errors import ModelError

    def none() -> Path:
        raise ModelError("no cache folder")

    monkeypatch.setattr(module, "cache_folder", none)
    with caplog.at_level(logging.WARNING):
        assert taken(model)[1]
    assert "not kept for the next start: no cache folder" in caplog.text
