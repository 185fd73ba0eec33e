"""A folder's safetensors in any layout, with tensors of any float type."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import packers
from doubles.tiny_models import Tiny, base, folder_files
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.model.checkpoint import SafetensorsCheckpoint
from octavo.model.describe import describe_model, load_weights

from .test_formats import gptq_config, save_packed

TINY = Tiny("Llama", base(num_hidden_layers=1))
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TINY.save(tmp_path)
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    description = describe_model(folder_files(folder), 64)
    return load_weights(description, dtype=torch.float32, device=torch.device("cpu"), progress=False)


def spread(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """The single file's tensors dealt out over `files`, so that neighbours are apart; returns a weight_map."""
    path, files = folder / SINGLE, list(files)
    tensors = load_file(path)
    path.unlink()
    home = {name: files[i % len(files)] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if home[name] == file}, folder / file)
    return home


def write_index(folder: Path, weight_map: Any, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def numbered(count: int) -> list[str]:
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


@pytest.mark.parametrize(
    ("files", "index"),
    [
        (numbered(3), INDEX),
        (numbered(3), None),
        (["weights.safetensors"], None),
        (["weights.safetensors"], "weights.safetensors.index.json"),
        (["decoder.fp16-1.safetensors", "decoder.fp16-2.safetensors"], "decoder.fp16.safetensors.index.json"),
        (["a.safetensors", "b.safetensors"], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_layout_holds_the_same(packed: bool, files: list[str], index: str | None, tmp_path: Path) -> None:
    if packed:
        save_packed(TINY, tmp_path, packers.gptq, gptq_config())
    else:
        TINY.save(tmp_path)
    wanted = {name: tensor.clone() for name, tensor in weights(tmp_path).items()}
    weight_map = spread(tmp_path, files)
    if index:
        write_index(tmp_path, weight_map, index)
    found = weights(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_second_copy_under_other_names_is_left_aside(folder: Path) -> None:
    spread(folder, numbered(2))
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    describe_model(folder_files(folder), 64)


def test_the_index_says_which_of_two_copies_counts(folder: Path) -> None:
    weight_map = spread(folder, numbered(2))
    name, home = next(iter(weight_map.items()))
    other = next(file for file in numbered(2) if file != home)
    right = load_file(folder / home)[name].clone()
    save_file({**load_file(folder / other), name: right + 1}, folder / other)
    assert f"tensor {name} is both in {min(home, other)} and in {max(home, other)}" in refusal(folder)
    write_index(folder, weight_map)
    assert torch.equal(SafetensorsCheckpoint(folder).read(name), right)


def test_the_usual_file_counts_where_an_index_of_another_name_is_there(folder: Path) -> None:
    write_index(folder, {"model.norm.weight": "else.safetensors"}, "model.fp16.safetensors.index.json")
    describe_model(folder_files(folder), 64)


def test_files_in_folders_of_their_own(folder: Path) -> None:
    weight_map = spread(folder, numbered(2))
    (folder / "shards").mkdir()
    for file in numbered(2):
        (folder / file).rename(folder / "shards" / file)
    write_index(folder, {name: f"shards/{file}" for name, file in weight_map.items()})
    assert SafetensorsCheckpoint(folder).shapes.keys() == weight_map.keys()


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        describe_model(folder_files(folder), 64)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def test_a_missing_file_of_a_set_without_an_index(folder: Path) -> None:
    spread(folder, numbered(3))
    (folder / numbered(3)[1]).unlink()
    assert f"lacks {numbered(3)[1]}, one of the 3 files of its set" in refusal(folder)


def test_a_missing_file_of_an_index(folder: Path) -> None:
    weight_map = spread(folder, numbered(3))
    write_index(folder, weight_map, "model.fp16.safetensors.index.json")
    (folder / numbered(3)[2]).unlink()
    said = f"lacks {numbered(3)[2]}, one of the 3 files that model.fp16.safetensors.index.json lists"
    assert said in refusal(folder)


def test_an_index_that_is_wrong_of_a_tensor(folder: Path) -> None:
    weight_map = spread(folder, numbered(2))
    write_index(folder, weight_map | {"model.norm.weight": numbered(2)[0], "model.more": numbered(2)[0]})
    assert f"{numbered(2)[0]} lacks tensor model." in refusal(folder)
    assert f"which {INDEX} says it holds" in refusal(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", {"model.norm.weight": 1}, {"model.norm.weight": None}])
def test_an_index_of_no_files(weight_map: Any, folder: Path) -> None:
    spread(folder, numbered(2))
    write_index(folder, weight_map)
    assert f"{INDEX} lists no files: it needs a weight_map from names of tensors to names of files" in refusal(folder)


def test_two_indexes_of_equal_right(folder: Path) -> None:
    weight_map = spread(folder, numbered(2))
    for kind in ("fp16", "fp32"):
        write_index(folder, weight_map, f"model.{kind}.safetensors.index.json")
    text = refusal(folder)
    assert "has model.fp16.safetensors.index.json and model.fp32.safetensors.index.json: rename the one" in text


def test_types_in_one_checkpoint_may_differ(folder: Path) -> None:
    path, types = folder / SINGLE, (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    large = ("embed_tokens.weight", "lm_head.weight")
    mixed = {
        name: tensor.to(torch.float16 if name.endswith(large) else types[i % 4])
        for i, (name, tensor) in enumerate(sorted(tensors.items()))
    }
    save_file(mixed, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    assert describe_model(folder_files(folder), 64).dtype == torch.float16  # of most numbers, not of most tensors
    found = weights(folder)
    assert torch.equal(found["embedding"], mixed["model.embed_tokens.weight"].float())
    parts = [mixed[f"model.layers.0.self_attn.{p}_proj.weight"].float() for p in "qkv"]
    assert torch.equal(found["layers.0.attn.qkv"], torch.cat(parts))
    assert torch.equal(found["final_norm"], mixed["model.norm.weight"].float())
