"""Loading: progress, biases that only some parts have, and what is left as it was."""

from pathlib import Path

import pytest
import torch
from doubles.tiny_models import Tiny, base, folder_files
from safetensors.torch import load_file, save_file

from octavo.model.describe import describe_model, load_weights

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Tiny("Llama", base()).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("seed", [None, 3])
def test_a_bar_is_shown_only_when_asked_for(folder: Path, capsys: pytest.CaptureFixture[str], seed: int | None) -> None:
    description = describe_model(folder_files(folder))
    capsys.readouterr()
    load_weights(description, dtype=torch.float32, device=CPU, progress=False, seed_dummy=seed)
    assert capsys.readouterr() == ("", "")
    load_weights(description, dtype=torch.float32, device=CPU, progress=True, seed_dummy=seed)
    out, err = capsys.readouterr()
    assert out == ""
    assert "weights: 100%" in err


def test_torchs_threads_are_left_as_they_were(folder: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load_weights(describe_model(folder_files(folder)), dtype=torch.float32, device=CPU, progress=False)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_parts_without_a_bias_get_zeros(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.self_attn.v_proj.bias"] = torch.arange(32.0)
    save_file(tensors, path)
    weights = load_weights(describe_model(folder_files(folder)), dtype=torch.float32, device=CPU, progress=False)
    assert [name for name in weights if name.endswith(".bias")] == ["layers.2.attn.qkv.bias"]
    bias = weights["layers.2.attn.qkv.bias"]
    assert torch.equal(bias, torch.cat((torch.zeros(96), torch.arange(32.0))))


def test_weights_outlive_their_file(folder: Path) -> None:
    description = describe_model(folder_files(folder))
    weights = load_weights(description, dtype=torch.float32, device=CPU, progress=False)
    path = folder / "model.safetensors"
    want = load_file(path)["model.norm.weight"].clone()
    path.write_bytes(b"")
    assert torch.equal(weights["final_norm"], want)
