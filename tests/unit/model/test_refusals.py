"""What cannot be served is refused in one line, before weights are read."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.family_cases import CASES
from doubles.tiny_models import Tiny, base, folder_files
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError, UnsupportedError
from octavo.model.describe import describe_model, load_weights

CPU = torch.device("cpu")
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Tiny("Llama", base(num_hidden_layers=2)).save(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


def refusal(folder: Path, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        describe_model(folder_files(folder), 64)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def test_the_folder_is_served_as_it_is(folder: Path) -> None:
    description = describe_model(folder_files(folder), 64)
    assert description.num_parameters == sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert description.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"sliding_window": -1.5}, "attn.window must be a positive integer or null, the config makes it -1.5"),
        ({"sliding_window": -1}, "attn.window must be a positive integer or null"),
        ({"sliding_window": math.nan}, "attn.window must be"),
        ({"sliding_window": "x"}, "attn.window must be"),
        ({"sliding_window": [7]}, "[7]"),
        ({"sliding_window": {"a": 1}}, "{'a': 1}"),
        ({"sliding_window": True}, "attn.window must be"),
        ({"sliding_window": 0, "layer_types": ["sliding_attention"] * 2}, "attn.window must be"),
        ({"rms_norm_eps": "1e-6"}, "eps must be a finite number, the config makes it '1e-6'"),
        ({"rms_norm_eps": math.inf}, "eps must be a finite number"),
        ({"tie_word_embeddings": "no"}, "tied_embeddings must be true or false, the config makes it 'no'"),
        ({"rope_parameters": {"rope_theta": math.inf, "rope_type": "linear", "factor": 0.0}}, "attn.rope.inv_freq"),
    ],
    ids=str,
)
def test_values_that_are_not_of_their_type(changes: dict[str, Any], rule: str, folder: Path) -> None:
    """Python's JSON reads NaN and Infinity too."""
    edit_config(folder, model_type="mistral", **changes)
    assert rule in refusal(folder)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"', "\ufeff{}"])
def test_a_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "megalomodel"}, "model type 'megalomodel' is not supported, supported are"),
        ({"model_type": None}, "model type None is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder (t5)"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "weights quantised by 'bitsandbytes'; read are awq, ",
        ),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope scaling 'spiral' is not known"),
        ({"hidden_act": "wavelet"}, "activation 'wavelet' is not known"),
    ],
)
def test_what_no_family_covers(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(folder, **changes)
    assert said in refusal(folder, UnsupportedError)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": ...}, "lacks 'hidden_size', which a model of type 'llama' needs"),
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
        ({"hidden_size": "many"}, "hidden_size must be a positive integer, the config makes it 'many'"),
        ({"num_attention_heads": 0}, "attn.num_heads must be a positive integer, the config makes it 0"),
        ({"hidden_size": 2**31}, "hidden_size must be at most 1048576, it is 2147483648"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 4096"),
        ({"num_hidden_layers": math.inf}, "num_hidden_layers must be at most 4096, it is inf"),
        ({"num_hidden_layers": 0}, "layers must be some, each Layer, the config makes it ()"),
        ({"num_hidden_layers": -1}, "lists 0 layer_types for -1 layers"),
        ({"head_dim": 10**9}, "head_dim must be at most 65536"),
        ({"max_position_embeddings": -5}, "max_position_embeddings must be a positive integer, it is -5"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads evenly"),
        ({"layer_types": ["full_attention"]}, "lists 1 layer_types for 2 layers"),
        ({"layer_types": ["full_attention", "mamba"]}, "layers of type mamba are not known"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "values that make no llama model"),
        ({"eos_token_id": "</s>"}, "token ids must be integers"),
    ],
)
def test_configs_that_make_no_model(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(folder, **changes)
    assert said in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_experts_per_tok": 9},
            "mlp.top_k must be at most 4, the experts of the groups kept, the config makes it 9",
        ),
        ({"num_experts_per_tok": 5}, "mlp.top_k must be at most 4"),
        ({"n_group": 3}, "8 experts cannot be 3 groups of one size"),
        ({"topk_group": 5}, "mlp.groups.num_kept must be at most 4, the groups, the config makes it 5"),
        ({"n_group": 8}, "mlp.groups.top_per_group must be at most 1, the experts of a group, the config makes it 2"),
    ],
)
def test_mixtures_that_choose_more_than_there_is(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    CASES["deepseek_v3-yarn"].save(tmp_path)
    edit_config(tmp_path, **changes)
    assert said in refusal(tmp_path)


def test_a_token_takes_no_more_experts_than_there_are(tmp_path: Path) -> None:
    CASES["qwen3_moe"].save(tmp_path)
    edit_config(tmp_path, num_experts_per_tok=8)
    describe_model(folder_files(tmp_path), 64)
    edit_config(tmp_path, num_experts_per_tok=9)
    assert "mlp.top_k must be at most 8, the experts, the config makes it 9" in refusal(tmp_path)


def test_a_missing_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    text = refusal(folder)
    assert "tensor model.layers.1.self_attn.k_proj is missing" in text
    assert "to fill layers.1.attn.qkv [128, 64]" in text


def test_a_shape_that_does_not_fit(folder: Path) -> None:
    edit_config(folder, intermediate_size=95)
    text = refusal(folder)
    assert "tensor model.layers.0.mlp.gate_proj.weight has shape [96, 64], expected is [95, 64]" in text


def test_extra_tensors(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)
    text = refusal(folder)
    assert "9 of 21 tensors have no place" in text
    assert "model.layers.1.input_layernorm.weight" in text
    assert "12 were expected" in text


def test_a_bias_of_a_norm_that_has_none_is_extra(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.bias": torch.zeros(64)}))
    assert "model.norm.bias" in refusal(folder)


def test_a_bias_of_the_wrong_length(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(63)}))
    assert "has shape [63], expected is [64] for layers.0.attn.qkv.bias" in refusal(folder)


def test_old_writers_tables_are_ignored(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    describe_model(folder_files(folder), 64)


def test_a_tensor_in_a_type_that_is_not_read(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    assert f"tensor {name} is stored as I8, read are F64, F32, F16, BF16" in refusal(folder, UnsupportedError)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_a_file_cut_short(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "is no sound safetensors file" in refusal(folder)


def test_a_file_with_a_broken_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[20:40] = b"\xff" * 20
    path.write_bytes(content)
    assert "is no sound safetensors file" in refusal(folder)


def shard(folder: Path) -> Path:
    """Two files and an index in place of one; returns the index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    path.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, held in files.items() for name in held}}))
    return index


def test_shards_load_as_one_file_does(folder: Path) -> None:
    one = describe_model(folder_files(folder), 64)
    want = load_weights(one, dtype=torch.float32, device=CPU, progress=False)
    for index in (shard(folder), None):
        if index is None:
            (folder / "model.safetensors.index.json").unlink()  # any shard layout: names tell
        found = load_weights(describe_model(folder_files(folder), 64), dtype=torch.float32, device=CPU, progress=False)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    assert "lacks b.safetensors, one of the 2 files that model.safetensors.index.json lists" in refusal(folder)


def test_an_index_that_lists_nothing(folder: Path) -> None:
    shard(folder).write_text("{}")
    assert "lists no files" in refusal(folder)


def test_a_folder_without_weights_can_be_served_with_random_ones(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    description = describe_model(folder_files(folder), 64)
    assert description.num_parameters is None
    with pytest.raises(ModelError, match=r"has no \.safetensors file; it has pytorch_model\.bin"):
        load_weights(description, dtype=torch.float32, device=CPU, progress=False)
    made = [
        load_weights(description, dtype=torch.bfloat16, device=CPU, progress=False, seed_dummy=seed)
        for seed in (1, 1, 2)
    ]
    assert made[0]["layers.0.attn.qkv"].dtype == torch.bfloat16
    assert torch.equal(made[0]["layers.1.mlp.up"], made[1]["layers.1.mlp.up"])
    assert not torch.equal(made[0]["layers.1.mlp.up"], made[2]["layers.1.mlp.up"])
    assert (made[0]["layers.0.attn_pre"] == 1).all()
