"""Configs of every generation mean the same model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.family_cases import CASES
from doubles.tiny_models import Tiny, base, folder_files
from transformers import CONFIG_MAPPING

from octavo.contract import DecoderSpec
from octavo.model.config import ConfigView
from octavo.model.describe import describe_model
from octavo.model.families import FAMILIES

# What config.json of any model holds; everything else may be left to the config class.
ALWAYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def build(model_type: str, values: dict[str, Any]) -> DecoderSpec:
    family = FAMILIES[model_type]
    view = ConfigView({**values, "model_type": model_type}, "config.json", family.defaults, family.aliases)
    return family.build(view, 64)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_omitted_keys_have_the_values_of_the_config_class(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    whole = {k: v for k, v in config.to_dict().items() if v is not None}
    family = FAMILIES[model_type]
    always = {*ALWAYS, *(family.aliases[key] for key in ALWAYS if key in family.aliases)}
    experts = {k for k in whole if "expert" in k or "lora_rank" in k or (k.endswith("head_dim") and k != "head_dim")}
    least = {k: v for k, v in whole.items() if k in always | experts | {"moe_intermediate_size", "n_positions"}}
    if "n_positions" not in whole:
        least["max_position_embeddings"] = whole["max_position_embeddings"]
    assert build(model_type, least) == build(model_type, whole)


def in_old_words(config: dict[str, Any]) -> dict[str, Any]:
    """As writers before rope_parameters, dtype and layer_types had it."""
    old = dict(config)
    whole = old.pop("rope_parameters", {}) or {}
    p = dict(whole.get("full_attention", whole))
    if "rope_theta" in p:
        old["rotary_emb_base" if old["model_type"] == "gpt_neox" else "rope_theta"] = p.pop("rope_theta")
    if "partial_rotary_factor" in p:
        name = "rotary_pct" if old["model_type"] == "gpt_neox" else "partial_rotary_factor"
        old[name] = p.pop("partial_rotary_factor")
    if "sliding_attention" in whole:
        old["rope_local_base_freq"] = whole["sliding_attention"]["rope_theta"]
    scaling = p.pop("rope_type", "default")
    old["rope_scaling"] = None if scaling == "default" else {"type": scaling, **p}
    old["torch_dtype"] = old.pop("dtype", None)
    if config["model_type"] not in ("exaone4", "ministral", "qwen2_moe"):
        old.pop("layer_types", None)
    return old


@pytest.mark.parametrize("case", CASES)
def test_old_words_mean_the_same(case: str, tmp_path: Path) -> None:
    tiny = CASES[case]
    tiny.config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    new = json.loads(path.read_text())
    described = describe_model(folder_files(tmp_path), 64)
    pattern = tiny.arguments.get("sliding_window_pattern")
    path.write_text(json.dumps(in_old_words(new) | ({"sliding_window_pattern": pattern} if pattern else {})))
    assert describe_model(folder_files(tmp_path), 64).spec == described.spec


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Tiny("Llama", base(eos_token_id=3, bos_token_id=1)).config().save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **changes: Any) -> None:
    write(folder, "config.json", json.loads((folder / "config.json").read_text()) | changes)


def test_generation_config_has_the_last_word_on_ends_and_sampling(folder: Path) -> None:
    description = describe_model(folder_files(folder))
    assert description.eos_token_ids == frozenset({3})
    assert description.bos_token_id == 1
    assert description.sampling_defaults == {}
    assert description.max_position == 256
    generation = {"eos_token_id": [7, 9], "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_length": 12}
    write(folder, "generation_config.json", generation)
    description = describe_model(folder_files(folder))
    assert description.eos_token_ids == frozenset({7, 9})
    assert description.bos_token_id == 1
    assert description.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_what_the_config_says(folder: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", {k: v for k, v in config.items() if k != "dtype"} | {key: "bfloat16"})
    assert describe_model(folder_files(folder)).dtype == torch.bfloat16


def test_a_decoder_nested_in_a_bigger_model(tmp_path: Path) -> None:
    """Its config lies in text_config, its tensors beside those of a vision tower."""
    from safetensors.torch import load_file, save_file

    tiny = CASES["gemma3"]
    tiny.save(tmp_path)
    plain = describe_model(folder_files(tmp_path), 64)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": config, "vision_config": {}}
    write(tmp_path, "config.json", outer)
    tensors = load_file(tmp_path / "model.safetensors")
    for prefix in ("language_model.", "model.language_model."):
        old = "model." if prefix.startswith("model.") else ""
        moved = {prefix + name.removeprefix(old): tensor for name, tensor in tensors.items()}
        moved["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(2, 2)
        save_file(moved, tmp_path / "model.safetensors")
        nested = describe_model(folder_files(tmp_path), 64)
        assert nested.spec == plain.spec
        assert nested.eos_token_ids == frozenset({1, 106})


def test_a_decoder_saved_without_its_head(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    CASES["gpt2"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)  # the causal mask, as old writers stored it
    save_file(bare, tmp_path / "model.safetensors")
    describe_model(folder_files(tmp_path), 64)


def test_settings_that_no_spec_says_are_refused() -> None:
    from octavo.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="opt-350m"):
        build("opt", {**base(ffn_dim=96), "do_layer_norm_before": False})
    with pytest.raises(UnsupportedError, match="scaled by layer"):
        build("gpt2", {**base(), "scale_attn_by_inverse_layer_idx": True})
    with pytest.raises(UnsupportedError, match="swiglu_limit 5"):
        build("gpt_oss", {**base(num_local_experts=4, num_experts_per_tok=2), "swiglu_limit": 5.0})


DYNAMIC = {"type": "dynamic", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("scaling", "asked", "served"),
    [
        (None, None, 256),
        (None, 999, 256),
        ({"type": "linear", "factor": 4.0}, 999, 256),
        (YARN, None, 1024),
        (YARN, 100, 1024),
        (DYNAMIC, None, 256),
        (DYNAMIC, 100, 256),
        (DYNAMIC, 700, 700),
        (DYNAMIC, 5000, 1024),
    ],
)
def test_scaled_rope_serves_more_positions(
    folder: Path, scaling: dict[str, Any] | None, asked: int | None, served: int
) -> None:
    change(folder, rope_parameters=None, rope_scaling=scaling, rope_theta=10000.0)
    assert describe_model(folder_files(folder), asked).max_position == served


@pytest.mark.parametrize("tied", [True, False])
def test_a_nested_decoder_may_be_tied_outside(tmp_path: Path, tied: bool) -> None:
    nested = Tiny("Llama", base()).config().to_dict()
    del nested["tie_word_embeddings"]
    write(tmp_path, "config.json", {"model_type": "outer", "tie_word_embeddings": tied, "text_config": nested})
    assert describe_model(folder_files(tmp_path)).spec.tied_embeddings is tied


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_longrope_by_its_first_names(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = base(original_max_position_embeddings=64, rope_scaling=scaling)
    expected = base(original_max_position_embeddings=64, rope_scaling=scaling | {"type": "longrope"})
    assert build("phi3", values) == build("phi3", expected)
