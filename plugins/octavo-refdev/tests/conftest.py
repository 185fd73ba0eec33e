"""A tiny random llama that never ends on its own, and engines that serve it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import LLM
from octavo_refdev.device import Device
from octavo_refdev.platform import RefdevPlatform

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
EXPERTS = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
EXPERTS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
MakeLLM = Callable[..., LLM]


def _weights(generator: torch.Generator, num_experts: int = 0) -> dict[str, torch.Tensor]:
    """Large enough for queries to single out keys, so that a wrong block changes tokens."""

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    weights = {
        "model.embed_tokens.weight": random(256, 48) * 5,
        "model.norm.weight": torch.ones(48),
        "lm_head.weight": random(256, 48),
    }
    shapes = {"q_proj": (96, 48), "k_proj": (32, 48), "v_proj": (32, 48), "o_proj": (48, 96)}
    shapes_mlp = {"gate_proj": (80, 48), "up_proj": (80, 48), "down_proj": (48, 80)}
    for i in range(2):
        at = f"model.layers.{i}"
        weights |= {f"{at}.self_attn.{name}.weight": random(*shape) for name, shape in shapes.items()}
        if num_experts:
            names = dict(zip(("w1", "w3", "w2"), shapes_mlp.values(), strict=True))
            experts = [f"{at}.block_sparse_moe.experts.{n}" for n in range(num_experts)]
            weights[f"{at}.block_sparse_moe.gate.weight"] = random(num_experts, 48)
            weights |= {f"{one}.{name}.weight": random(*shape) for one in experts for name, shape in names.items()}
        else:
            weights |= {f"{at}.mlp.{name}.weight": random(*shape) for name, shape in shapes_mlp.items()}
        weights |= {f"{at}.{name}.weight": torch.ones(48) for name in ("input_layernorm", "post_attention_layernorm")}
    return weights


def _write(folder: Path, config: dict[str, Any], num_experts: int = 0) -> Path:
    """A folder in Hugging Face layout; a token is a byte."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(torch.Generator().manual_seed(0), num_experts), str(folder / "model.safetensors"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 6 query and 2 key heads."""
    return _write(tmp_path_factory.mktemp("tiny_llama"), CONFIG)


@pytest.fixture(scope="session")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a mixture of 4 experts in each layer, of which a token takes 2."""
    return _write(tmp_path_factory.mktemp("tiny_mixtral"), CONFIG | EXPERTS, num_experts=4)


@pytest.fixture
def make_llm(tiny_llama: Path) -> Iterator[MakeLLM]:
    """An engine on a platform, closed after the test."""
    made: list[LLM] = []

    def make(platform: str, model: Path = tiny_llama, **settings: Any) -> LLM:
        defaults = {"dtype": "float32", "num_threads": 1, "block_size": 8, "num_blocks_override": 64}
        made.append(LLM(model, platform=platform, **(defaults | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def device() -> Iterator[Device]:
    """The device of this process, its counts at zero."""
    opened = RefdevPlatform(0)._device
    opened.counts.clear()
    yield opened
    opened.strict = False


@pytest.fixture
def run() -> Callable[[str], "subprocess.CompletedProcess[str]"]:
    """Run a script in a process of its own."""

    def run(script: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})

    return run
