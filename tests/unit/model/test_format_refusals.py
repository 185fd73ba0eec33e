"""Packed checkpoints of other kinds, and broken ones, are refused in one line before weights are read."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import packers
from doubles.tiny_models import Tiny, base, folder_files
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError, UnsupportedError
from octavo.model.describe import describe_model, load_weights

from .test_formats import compressed_config, gptq_config, save_packed, set_quantization

TINY = Tiny("Llama", base(num_hidden_layers=1))
Q = "model.layers.0.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
WORDS = compressed_config("pack-quantized")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a format."""
    root = tmp_path_factory.mktemp("packed")
    save_packed(TINY, root / "gptq", packers.gptq, gptq_config())
    save_packed(TINY, root / "awq", packers.awq, AWQ)
    save_packed(TINY, root / "fp8", lambda w: packers.fp8(w, by="block", block=(32, 32)), FP8)
    save_packed(TINY, root / "words", packers.compressed, WORDS)
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one to spoil."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(made / kind, tmp_path / kind))

    return copy


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Change tensors of `Q`, by the ends of their names: a tensor, a function of the old one, or None to drop it."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for part, change in changes.items():
        old = tensors.pop(f"{Q}.{part}", None)
        new = change(old) if callable(change) else change
        if new is not None:
            tensors[f"{Q}.{part}"] = new.contiguous()
    save_file(tensors, path)


def refusal(folder: Path, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        describe_model(folder_files(folder), 64)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def test_each_is_served_unspoilt(made: Path) -> None:
    for kind in ("gptq", "awq", "fp8", "words"):
        assert describe_model(folder_files(made / kind), 64).quantization


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (
            {"bits": 4},
            "weights quantised by an unnamed method; read are awq, compressed-tensors, fbgemm_fp8, fp8, gptq",
        ),
        ({"quant_method": ["gptq"]}, "weights quantised by ['gptq']; read are"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights quantised by 'bitsandbytes'; read are"),
        (gptq_config(bits=5), "quantised by gptq with bits 5; read are 2, 3, 4, 8"),
        (gptq_config(bits="4"), "quantised by gptq with bits '4'; read are 2, 3, 4, 8"),
        (gptq_config(bits=True), "quantised by gptq with bits True; read are"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format 'marlin'; read are 'gptq', 'gptq_v2'"),
        (gptq_config(is_marlin_format=True), "is_marlin_format True; read are False"),
        (gptq_config(pack_dtype="int8"), "pack_dtype 'int8'; read are 'int32'"),
        (gptq_config(dynamic={"+:.*down.*": {"bits": 8}}), "settings of their own for layers '+:.*down.*'"),
        (AWQ | {"bits": 8}, "quantised by awq with bits 8; read are 4"),
        (AWQ | {"version": "gemv"}, "quantised by awq with version 'gemv'; read are 'gemm'"),
        ({"quant_method": "awq", "format": "llm-awq"}, "quantised by awq with format 'llm-awq'; read are 'gemm'"),
        ({"quant_method": "gptq", "format": "marlin"}, "quantised by gptq with format 'marlin'; read are 'gptq'"),
        (FP8 | {"expert_dtype": "fp4"}, "quantised by fp8 with expert_dtype 'fp4'; read are 'fp8'"),
        (AWQ | {"zero_point": False}, "quantised by awq with zero_point False; read are True"),
        (FP8 | {"fmt": "e3m4"}, "quantised by fp8 with fmt 'e3m4'; read are 'e4m3'"),
        (compressed_config("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'; read are 'float-quantized'"),
        (compressed_config("pack-quantized", num_bits=3), "num_bits 3; read are 4, 8"),
        (compressed_config("pack-quantized", strategy="token"), "strategy 'token'; read are"),
        (compressed_config("int-quantized", num_bits=8, symmetric=False), "symmetric False; read are True"),
        (WORDS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with a sparsity_config; read are formats"),
        (WORDS | {"transform_config": {"config_groups": {}}}, "with a transform_config; read are formats"),
        (
            WORDS | {"config_groups": {**WORDS["config_groups"], "b": {"weights": {"num_bits": 8}}}},
            "with 2 ways to store weights; read are one for all layers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variants_that_are_not_read(quantization: Any, said: str, folder: Callable[[str], Path]) -> None:
    spoilt = folder("gptq")
    set_quantization(spoilt, quantization)
    assert said in refusal(spoilt, UnsupportedError)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ("gptq", "quantization_config must be an object, it is 'gptq'"),
        (gptq_config(group_size=0), "group_size of the quantization_config must be a positive integer, it is 0"),
        (
            gptq_config(group_size="all"),
            "group_size of the quantization_config must be a positive integer, it is 'all'",
        ),
        (
            FP8 | {"weight_block_size": [128]},
            "weight_block_size of the quantization_config must be a list of 2 positive",
        ),
        (WORDS | {"config_groups": None}, "needs config_groups that say how weights are stored"),
        (WORDS | {"config_groups": {"a": {"weights": None}}}, "needs config_groups that say how weights are stored"),
        (compressed_config("float-quantized", num_bits=8, strategy="block"), "by block without its size"),
    ],
)
def test_settings_that_make_no_sense(quantization: Any, said: str, folder: Callable[[str], Path]) -> None:
    spoilt = folder("gptq")
    set_quantization(spoilt, quantization)
    assert said in refusal(spoilt)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gptq", {"qzeros": None}, f"tensor {Q}.qzeros is missing, which {Q}.qweight needs"),
        ("gptq", {"scales": None}, f"tensor {Q}.scales is missing, which {Q}.qweight needs"),
        ("gptq", {"qweight": None}, f"tensor {Q} is missing"),
        ("gptq", {"scales": lambda t: t[:1]}, f"{Q}.scales has shape [1, 64], expected is [2, 64] to fit {Q}.qweight"),
        ("gptq", {"scales": lambda t: t.int()}, f"{Q}.scales is stored as I32, expected is F64 or F32 or F16 or BF16"),
        ("gptq", {"qzeros": lambda t: t[:, :-1]}, f"{Q}.qzeros has shape [2, 7], expected is [2, 8] to fit"),
        ("gptq", {"qweight": lambda t: t.float()}, f"{Q}.qweight is stored as F32, expected is I32"),
        ("gptq", {"qweight": lambda t: t.flatten()}, f"{Q}.qweight [512] is no matrix packed along inputs"),
        ("gptq", {"qweight": lambda t: t[:-1]}, f"{Q}.g_idx has shape [64], expected is [56] to fit"),
        ("gptq", {"g_idx": lambda t: t[1:]}, f"{Q}.g_idx has shape [63], expected is [64] to fit"),
        ("gptq", {"weight": torch.zeros(64, 64)}, f"{Q}.weight is there both dense and packed ({Q}.qweight, "),
        ("awq", {"qzeros": None}, f"tensor {Q}.qzeros is missing, which {Q}.qweight needs"),
        ("awq", {"scales": lambda t: t.T[:8]}, f"{Q}.scales has shape [8, 2], expected is [2, 64] to fit"),
        (
            "awq",
            {"qweight": lambda t: t[None]},
            f"{Q}.qweight [1, 64, 8] is no packed matrix (AWQ, 4 bits, groups of 32)",
        ),
        (
            "awq",
            {"qweight": lambda t: t[:, :4], "qzeros": lambda t: t[:, :4], "scales": lambda t: t[:, :32]},
            f"tensor {Q}.weight has shape [32, 64], expected is [64, 64] for layers.0.attn.qkv",
        ),
        ("fp8", {"weight_scale": None}, f"tensor {Q}.weight_scale_inv is missing, which {Q}.weight needs"),
        ("fp8", {"weight_scale": lambda t: t[:1]}, f"{Q}.weight_scale has shape [1, 2], expected is [2, 2] to fit"),
        ("fp8", {"weight": lambda t: t[0]}, f"{Q}.weight [64] in F8_E4M3 is no matrix"),
        ("words", {"weight_shape": None}, f"tensor {Q}.weight_shape is missing, which {Q}.weight_packed needs"),
        (
            "words",
            {"weight_shape": torch.tensor([64, 80])},
            f"{Q}.weight_shape says [64, 80], but {Q}.weight_packed is",
        ),
        ("words", {"weight_shape": torch.tensor([-64, 64])}, f"{Q}.weight_shape says [-64, 64], but"),
        ("words", {"weight_scale": lambda t: t[:, :1]}, f"{Q}.weight_scale has shape [64, 1], expected is [64, 2]"),
        ("words", {"weight_zero_point": torch.zeros(3, 2).int()}, f"{Q}.weight_zero_point has shape [3, 2], expected"),
        ("words", {"weight_scales": torch.zeros(1)}, f"have no place in the model that its config describes: {Q}.w"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit(
    kind: str, changes: dict[str, Any], said: str, folder: Callable[[str], Path]
) -> None:
    spoilt = folder(kind)
    edit_tensors(spoilt, **changes)
    assert said in refusal(spoilt)


def test_act_order_needs_its_groups(folder: Callable[[str], Path]) -> None:
    spoilt = folder("gptq")
    set_quantization(spoilt, gptq_config(desc_act=True))
    edit_tensors(spoilt, g_idx=None)
    assert f"tensor {Q}.g_idx is missing, which {Q}.qweight needs" in refusal(spoilt)


@pytest.mark.parametrize("bad", [-1, 2])
def test_groups_that_are_none(bad: int, folder: Callable[[str], Path]) -> None:
    spoilt = folder("gptq")
    edit_tensors(spoilt, g_idx=lambda t: torch.cat([t[:-1], torch.tensor([bad]).int()]))
    description = describe_model(folder_files(spoilt), 64)
    with pytest.raises(ModelError, match=rf"{Q}\.g_idx has groups .* its scales are of groups 0 to 1"):
        load_weights(description, dtype=torch.float32, device=torch.device("cpu"), progress=False)


@pytest.mark.parametrize(
    ("kind", "quantization", "said"),
    [
        ("gptq", FP8, "weights are quantised (fp8, 32x32 blocks), but none of its 33 tensors is"),
        ("fp8", gptq_config(), "weights are quantised (GPTQ, 4 bits, groups of 32), but none of its 19 tensors is"),
        ("fp8", {"quant_method": "mxfp4"}, "weights are quantised (MXFP4), but none of its 19 tensors is; if they are"),
        ("gptq", gptq_config(bits=8), f"expected is [2, 16] to fit {Q}.qweight [12, 64] (GPTQ, 8 bits, groups of 32)"),
        (
            "gptq",
            gptq_config(group_size=64),
            f"expected is [2, 8] to fit {Q}.qweight [12, 64] (GPTQ, 4 bits, groups of 64)",
        ),
        ("gptq", None, f"tensor {Q} is missing"),
        ("fp8", None, "is stored as F8_E4M3, read are F64, F32, F16, BF16"),
    ],
)
def test_a_config_of_another_checkpoint(kind: str, quantization: Any, said: str, folder: Callable[[str], Path]) -> None:
    spoilt = folder(kind)
    set_quantization(spoilt, quantization)
    assert said in re.sub(r"model\.layers\.0\.[a-z_]+\.[a-z]+_proj", Q, refusal(spoilt))  # whichever comes first


def test_a_packed_file_cut_short(folder: Callable[[str], Path]) -> None:
    spoilt = folder("awq")
    path = spoilt / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "is no sound safetensors file" in refusal(spoilt)
