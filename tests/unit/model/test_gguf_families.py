"""Models written as GGUF files by llama.cpp's rules give the logits of the model that was written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.family_cases import CASES
from doubles.paged_program import Paged
from doubles.tiny_models import Tiny, gguf_files

from octavo.errors import ModelError, UnsupportedError
from octavo.model.describe import describe_model, load_weights

from .converter import Conversion, write_gguf, write_tensors
from .harness import compare

WINDOW = {"sliding_window": "attention.sliding_window"}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}

CONVERSIONS = {
    "llama": Conversion("LLAMA", permuted=True),
    "llama-biases-head-dim": Conversion("LLAMA", permuted=True),
    "llama-rope-linear": Conversion("LLAMA", permuted=True),
    "llama-rope-yarn": Conversion("LLAMA", permuted=True),
    "mistral-no-window": Conversion("LLAMA", permuted=True),
    "qwen2": Conversion("QWEN2"),
    "phi3-window": Conversion("PHI3", WINDOW),
    "seed_oss": Conversion("SEED_OSS"),
    "arcee": Conversion("ARCEE", permuted=True),
    "gemma": Conversion("GEMMA", whole_norms=True),
    "olmo-clip": Conversion("OLMO", {"clip_qkv": "attention.clamp_kqv"}, permuted=True),
    "cohere": Conversion("COMMAND_R", {"logit_scale": "logit_scale"}),
    "cohere-qk-norm": Conversion("COMMAND_R", {"logit_scale": "logit_scale"}),
    "qwen3": Conversion("QWEN3"),
    "gemma2-by-head": Conversion("GEMMA2", WINDOW | CAPS, whole_norms=True),
    "gemma3-by-head": Conversion("GEMMA3", WINDOW, whole_norms=True),
    "granite": Conversion("GRANITE", GRANITE, permuted=True),
    "olmo2": Conversion("OLMO2"),
    "olmo3-window": Conversion("OLMO2", WINDOW, window_pattern=True),
    "exaone4-window": Conversion("EXAONE4", WINDOW, window_pattern=True),
    "exaone4-full": Conversion("EXAONE4", WINDOW),
    "smollm3-default": Conversion("SMOLLM3", permuted=True),
    "glm4": Conversion("GLM4", rotary_share=0.5),
    "ernie4_5": Conversion("ERNIE4_5"),
    "cohere2-default": Conversion("COHERE2", WINDOW | {"logit_scale": "logit_scale"}),
    "stablelm": Conversion("STABLELM", rotary_share=0.25),
    "stablelm-parallel-qk-norm": Conversion("STABLELM", rotary_share=0.25),
    "phi": Conversion("PHI2", rotary_share=0.5),
    "starcoder2-no-window": Conversion("STARCODER2"),
    "nemotron": Conversion("NEMOTRON", whole_norms=True, rotary_share=0.5),
    "gpt_neox": Conversion("GPTNEOX", {"use_parallel_residual": "use_parallel_residual"}, rotary_share=0.5),
    "gpt_neox-sequential": Conversion("GPTNEOX", {"use_parallel_residual": "use_parallel_residual"}, rotary_share=0.25),
    "gpt2": Conversion("GPT2", extra={"feed_forward_length": 256}),
    "mixtral-no-window": Conversion("LLAMA", permuted=True),
    "granitemoe": Conversion("GRANITE_MOE", GRANITE, permuted=True),
    "minimax_m2": Conversion("MINIMAXM2", rotary_share=1.0),
    "olmoe-clip": Conversion("OLMOE", {"clip_qkv": "attention.clamp_kqv"}),
    "qwen3_moe-all-sparse": Conversion("QWEN3MOE"),
    "qwen2_moe": Conversion("QWEN2MOE", {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}),
    "gpt_oss": Conversion("GPT_OSS", WINDOW | {"intermediate_size": "expert_feed_forward_length"}),
    "glm4_moe-qk-norm": Conversion(
        "GLM4_MOE",
        {
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        rotary_share=0.5,
    ),
}
DEEPSEEK = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_head_dim": "attention.key_length_mla",
    "v_head_dim": "attention.value_length_mla",
    "qk_rope_head_dim": "rope.dimension_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
NORMED = {"norm_topk_prob": "expert_weights_norm"}
LATENT: dict[str, Any] = {"attention.head_count_kv": 1, "attention.key_length": 24, "expert_gating_func": 2}
CONVERSIONS |= {
    "deepseek_v3-yarn": Conversion(
        "DEEPSEEK2", DEEPSEEK | NORMED, extra=LATENT | {"rope.scaling.yarn_log_multiplier": 0.1}
    ),
    "deepseek_v3-no-q-rank": Conversion("DEEPSEEK2", DEEPSEEK, extra=LATENT),
}
# Files say less than configs do: these have what llama.cpp takes for granted.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2-by-head": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3-by-head": ("gemma3", {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6}),
    "smollm3-default": ("smollm3", {"no_rope_layer_interval": 4}),
    "cohere2-default": ("cohere2", {"sliding_window_pattern": 4}),
    "starcoder2-no-window": ("starcoder2-window", {"sliding_window": None}),
    "mixtral-no-window": ("mixtral-window", {"sliding_window": None}),
    "qwen3_moe-all-sparse": ("qwen3_moe", {"mlp_only_layers": []}),
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, changes = VARIANTS.get(case, (case, {}))
    known = CASES[name]
    tiny = Tiny(known.name, known.arguments | changes, known.config_class, known.model_class)
    model = tiny.save(tmp_path)
    path = tmp_path / "tiny.gguf"
    write_gguf(tmp_path, path, CONVERSIONS[case])
    compare(Paged(describe_model(gguf_files(path), 64)), model, lengths=(40, 19))


def test_llama3_scaling_comes_as_a_tensor(tmp_path: Path) -> None:
    tiny = CASES["llama-rope-llama3-tied"]
    model = tiny.save(tmp_path)
    scaled, plain = model.model.rotary_emb.inv_freq, 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    path = tmp_path / "tiny.gguf"
    write_gguf(tmp_path, path, Conversion("LLAMA", permuted=True), {"rope_freqs.weight": (plain / scaled).numpy()})
    compare(Paged(describe_model(gguf_files(path), 64)), model, lengths=(40, 19))


def test_longrope_factors_come_as_tensors(tmp_path: Path) -> None:
    tiny = CASES["phi3-longrope-short"]
    model = tiny.save(tmp_path)
    rope = tiny.arguments["rope_parameters"]
    tables = {f"rope_factors_{k}.weight": np.array(rope[f"{k}_factor"], np.float32) for k in ("long", "short")}
    also = {"original_max_position_embeddings": "rope.scaling.original_context_length"}
    gain = (1 + np.log(4) / np.log(64)) ** 0.5  # made for 64 positions, stretched to 256
    path = tmp_path / "tiny.gguf"
    write_gguf(tmp_path, path, Conversion("PHI3", also, extra={"rope.scaling.attn_factor": float(gain)}), tables)
    compare(Paged(describe_model(gguf_files(path), 64)), model, lengths=(40, 19))


def test_experts_chosen_by_softmax_are_refused(tmp_path: Path) -> None:
    CASES["deepseek_v3-no-q-rank"].save(tmp_path)
    path = tmp_path / "tiny.gguf"
    write_gguf(tmp_path, path, Conversion("DEEPSEEK2", DEEPSEEK, extra=LATENT | {"expert_gating_func": 1}))
    assert "experts chosen by softmax (DeepSeek 2) are not supported" in refusal(path, UnsupportedError)


METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def tensors() -> dict[str, np.ndarray]:
    square = {f"blk.0.attn_{part}.weight": (32, 32) for part in ("q", "k", "v", "output")}
    mlp = {"blk.0.ffn_gate.weight": (64, 32), "blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64)}
    norms = dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (32,))
    shapes = {"token_embd.weight": (50, 32), **square, **mlp, **norms}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def refusal(path: Path, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        describe_model(gguf_files(path), 64)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_a_bare_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    write_tensors(path, "llama", METADATA, tensors())
    description = describe_model(gguf_files(path), None)
    assert description.spec.tied_embeddings
    assert description.spec.vocab_size == 50
    assert description.dtype == torch.float32
    assert description.eos_token_ids == frozenset()
    assert description.bos_token_id is None
    weights = load_weights(description, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    assert "head" not in weights


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "foreign.gguf"
    write_tensors(path, "mamba", {}, {})
    text = refusal(path, UnsupportedError)
    assert "architecture 'mamba' is not supported, supported are arcee, cohere2, command-r," in text


def test_a_tensor_in_a_type_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "integers.gguf"
    write_tensors(path, "llama", METADATA, tensors() | {"blk.0.ffn_up.weight": np.ones((64, 32), np.int8)})
    assert "tensor blk.0.ffn_up.weight is stored as I8, read are BF16, F16, F32" in refusal(path, UnsupportedError)


def test_one_file_of_several(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    write_tensors(path, "llama", METADATA | {"split.count": 2}, tensors())
    assert "one of 2 files of a split model" in refusal(path, UnsupportedError)


@pytest.mark.parametrize("gone", ["token_embd.weight", "blk.0.ffn_down.weight", "output_norm.weight"])
def test_a_missing_tensor(tmp_path: Path, gone: str) -> None:
    path = tmp_path / "holes.gguf"
    kept = tensors()
    del kept[gone]
    write_tensors(path, "llama", METADATA | {"llama.vocab_size": 50}, kept)
    assert f"tensor {gone.removesuffix('.weight')} is missing" in refusal(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.embedding_length", None, "lacks 'hidden_size'"),
        ("llama.block_count", "two", "values that make no GGUF model"),
        ("llama.attention.head_count", 0, "values that make no"),
        ("llama.attention.head_count_kv", [1, 2], "differs between layers"),
        ("llama.context_length", 0, "max_position_embeddings must be a positive integer"),
        ("llama.feed_forward_length", 65, "has shape [64, 32], expected is [65, 32]"),
        ("llama.rope.scaling.type", 7, "rope.scaling.type must be a name, it is 7"),
        ("llama.rope.scaling.type", "spiral", "rope scaling 'spiral' is not known"),
    ],
)
def test_metadata_that_makes_no_model(tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = tmp_path / "odd.gguf"
    metadata = {k: v for k, v in (METADATA | {key: value}).items() if v is not None}
    write_tensors(path, "llama", metadata, tensors())
    assert said in refusal(path)
