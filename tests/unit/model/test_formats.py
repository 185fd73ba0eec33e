"""Packed checkpoints give the weights and the logits of the dense ones that they stand for."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doubles import packers
from doubles.paged_program import Paged
from doubles.tiny_models import Tiny, base, folder_files, reference_logits
from safetensors.torch import load_file, save_file

from octavo.model.describe import describe_model, load_weights

CPU = torch.device("cpu")
TOKENS = [(7 * i + 3) % 160 for i in range(33)]
LLAMA = Tiny("Llama", base(num_hidden_layers=2))
QWEN2 = Tiny("Qwen2", base(num_hidden_layers=2))
PROJECTION = r".*\.(q|k|v|o|gate|up|down)_proj\.weight"
Pack = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def save_packed(
    tiny: Tiny,
    folder: Path,
    pack: Pack,
    quantization: dict[str, Any],
    *,
    names: str = PROJECTION,
    transposed: bool = False,
) -> None:
    """Write the model with the weights of `names` packed, and in the folder "dense" with those that they stand for."""
    tiny.save(folder)
    packed, dense = (load_file(folder / "model.safetensors") for _ in range(2))
    for name in [name for name in dense if re.fullmatch(names, name)]:
        weight = packed.pop(name)
        parts, values = pack(weight.T.contiguous() if transposed else weight)
        packed |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        dense[name] = values.T.contiguous() if transposed else values
    assert packed.keys() != dense.keys() or any(packed[name].dtype != dense[name].dtype for name in dense)
    shutil.copytree(folder, folder / "dense")
    save_file(packed, folder / "model.safetensors")
    save_file(dense, folder / "dense" / "model.safetensors", {"format": "pt"})
    set_quantization(folder, quantization)


def set_quantization(folder: Path, quantization: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def check_equals_dense(folder: Path) -> None:
    """Every weight is that of the dense model to the bit; the logits are transformers' own."""
    packed, dense = (describe_model(folder_files(path), 64) for path in (folder, folder / "dense"))
    found, wanted = (load_weights(d, dtype=torch.float32, device=CPU, progress=False) for d in (packed, dense))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert packed.num_parameters == dense.num_parameters
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "dense", dtype=torch.float32, attn_implementation="eager"
    )
    logits = Paged(packed, weights=found).chunked(TOKENS, 17)
    torch.testing.assert_close(logits, reference_logits(model.eval(), TOKENS), atol=1e-4, rtol=1e-4)


def gptq_config(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    return config | {"checkpoint_format": "gptq", "lm_head": False} | changes


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, act_order: bool, version: int, tmp_path: Path) -> None:
    pack = partial(packers.gptq, bits=bits, act_order=act_order, version=version)
    layout = "gptq" if version == 1 else "gptq_v2"
    config = gptq_config(bits=bits, desc_act=act_order, checkpoint_format=layout)
    save_packed(LLAMA, tmp_path, pack, config)
    check_equals_dense(tmp_path)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_zeros_that_borrow_from_their_neighbours(bits: int, tmp_path: Path) -> None:
    config = gptq_config(bits=bits, meta={"quantizer": ["gptqmodel:2.2.0"], "uri": "a page"})
    config["format"] = config.pop("checkpoint_format")  # as the same writer spells it
    save_packed(LLAMA, tmp_path, partial(packers.gptq, bits=bits, borrows=True), config)
    check_equals_dense(tmp_path)


@pytest.mark.parametrize("group_size", [-1, 16, 40, 1000])
def test_gptq_groups_of_any_size(group_size: int, tmp_path: Path) -> None:
    config = gptq_config(group_size=group_size)
    save_packed(LLAMA, tmp_path, partial(packers.gptq, group_size=group_size), config)
    check_equals_dense(tmp_path)


@pytest.mark.parametrize("written", ["absent", "zeros"])
def test_gptq_without_a_list_of_groups(written: str, tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, dense = packers.gptq(weight, symmetric=True)
        group = parts.pop("g_idx")
        return parts | ({"g_idx": torch.zeros_like(group)} if written == "zeros" else {}), dense

    save_packed(LLAMA, tmp_path, pack, gptq_config(sym=True))
    check_equals_dense(tmp_path)


def test_gptq_with_biases_and_a_packed_head(tmp_path: Path) -> None:
    config = gptq_config(lm_head=True, dynamic={"-:.*norm": {}}, modules_to_not_convert=None)
    save_packed(QWEN2, tmp_path, packers.gptq, config, names=rf"{PROJECTION}|lm_head\.weight")
    check_equals_dense(tmp_path)


def test_gptq_beside_dense_layers(tmp_path: Path) -> None:
    names = r"model\.layers\.1\.(self_attn\.q|mlp\.down)_proj\.weight"
    save_packed(LLAMA, tmp_path, packers.gptq, gptq_config(), names=names)
    check_equals_dense(tmp_path)


def test_gptq_of_a_family_that_stores_inputs_by_outputs(tmp_path: Path) -> None:
    sizes = {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": None}
    tiny = Tiny("GPT2", sizes, model_class="GPT2LMHeadModel")
    names = r"transformer\.h\.\d\.(attn|mlp)\.c_(attn|proj|fc)\.weight"
    save_packed(tiny, tmp_path, packers.gptq, gptq_config(), names=names, transposed=True)
    check_equals_dense(tmp_path)


def test_gptq_of_old_writers(tmp_path: Path) -> None:
    save_packed(LLAMA, tmp_path, partial(packers.gptq, act_order=True), {})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 32, "desc_act": True, "damp_percent": 0.01, "model_name_or_path": None})
    )
    check_equals_dense(tmp_path)


@pytest.mark.parametrize("group_size", [-1, 16, 32])
def test_awq(group_size: int, tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    pack = partial(packers.awq, group_size=group_size)
    save_packed(LLAMA, tmp_path, pack, config | {"modules_to_not_convert": ["lm_head"]})
    check_equals_dense(tmp_path)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (20, 24), (7, 96)], ids=str)
def test_fp8_by_block(block: tuple[int, int], tmp_path: Path) -> None:
    pack = partial(packers.fp8, by="block", block=block, suffix="weight_scale_inv")
    save_packed(QWEN2, tmp_path, pack, FP8 | {"weight_block_size": list(block)})
    check_equals_dense(tmp_path)


@pytest.mark.parametrize("by", ["tensor", "row", "channel"])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "compressed-tensors"])
def test_fp8_by_tensor_and_by_output(method: str, by: str, tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, dense = packers.fp8(weight, by=by)
        return parts | {"input_scale": torch.tensor(0.1)}, dense  # which only activations in float8 need

    config = compressed_config("float-quantized", type="float", num_bits=8, strategy=by.replace("row", "channel"))
    config = config if method == "compressed-tensors" else {"quant_method": method}
    save_packed(LLAMA, tmp_path, pack, config)
    check_equals_dense(tmp_path)


def test_fp8_scales_of_low_precision(tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.bfloat16, torch.float8_e8m0fnu)):

        def pack(weight: torch.Tensor, dtype: torch.dtype = dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            parts, _ = packers.fp8(weight, by="channel")
            scales = parts["weight_scale"].to(dtype)
            return parts | {"weight_scale": scales}, parts["weight"].float() * scales.float()

        folder = tmp_path / str(number)
        save_packed(LLAMA, folder, pack, FP8)
        check_equals_dense(folder)


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    stored = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": stored, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"symmetric": False},
        {"act_order": True, "symmetric": False},
        {"bits": 8, "group_size": -1},
        {"group_size": 40},
    ],
    ids=str,
)
def test_compressed_integers(settings: dict[str, Any], tmp_path: Path) -> None:
    group_size = settings.get("group_size", 32)
    config = compressed_config(
        "pack-quantized",
        num_bits=settings.get("bits", 4),
        strategy="channel" if group_size == -1 else "group",
        group_size=group_size,
        symmetric=settings.get("symmetric", True),
    )
    save_packed(LLAMA, tmp_path, partial(packers.compressed, **settings), config)
    check_equals_dense(tmp_path)


def test_compressed_int8_and_blocks(tmp_path: Path) -> None:
    def int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / scale).round().to(torch.int8)
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    config = compressed_config("int-quantized", num_bits=8, strategy="channel")
    save_packed(LLAMA, tmp_path / "a", int8, config)
    check_equals_dense(tmp_path / "a")
    config = compressed_config("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[16, 32])
    pack = partial(packers.fp8, by="block", block=(16, 32))
    save_packed(LLAMA, tmp_path / "b", pack, config)
    check_equals_dense(tmp_path / "b")


def test_mxfp4_experts(tmp_path: Path) -> None:
    tiny = Tiny("GptOss", base(head_dim=32, num_local_experts=6, num_experts_per_tok=3, num_hidden_layers=2))

    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        experts, num_inputs, num_outputs = weight.shape
        parts, dense = packers.mxfp4((experts, num_outputs, num_inputs), seed=num_outputs)
        return parts, dense.transpose(1, 2).contiguous()

    names = r".*\.experts\.(gate_up|down)_proj"
    save_packed(tiny, tmp_path, pack, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, names=names)
    check_equals_dense(tmp_path)


EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2}
DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8}
DEEPSEEK |= {"v_head_dim": 12, "qk_nope_head_dim": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}


def test_experts_in_gptq(tmp_path: Path) -> None:
    tiny = Tiny("Qwen3Moe", base(**EXPERTS, num_experts=8, head_dim=16))
    save_packed(tiny, tmp_path, partial(packers.gptq, act_order=True), gptq_config(desc_act=True))
    assert any("experts.7.down_proj.qweight" in name for name in load_file(tmp_path / "model.safetensors"))
    check_equals_dense(tmp_path)


def test_latent_attention_and_experts_in_fp8(tmp_path: Path) -> None:
    tiny = Tiny("DeepseekV3", base(**EXPERTS, **DEEPSEEK, num_key_value_heads=4))
    pack = partial(packers.fp8, by="block", block=(16, 32), suffix="weight_scale_inv")
    names = r"model\.layers.*_(proj|a|b|a_proj_with_mqa)\.weight"
    save_packed(tiny, tmp_path, pack, FP8 | {"weight_block_size": [16, 32]}, names=names)
    assert any("kv_b_proj.weight_scale_inv" in name for name in load_file(tmp_path / "model.safetensors"))
    check_equals_dense(tmp_path)


def test_a_packed_checkpoint_computes_in_the_type_of_what_is_dense(tmp_path: Path) -> None:
    save_packed(Tiny("Llama", base(num_hidden_layers=1)), tmp_path, packers.gptq, gptq_config())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    wide = ("norm.weight",)
    save_file({n: t.half() if t.is_floating_point() and not n.endswith(wide) else t for n, t in tensors.items()}, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    assert describe_model(folder_files(tmp_path), 64).dtype == torch.float16
