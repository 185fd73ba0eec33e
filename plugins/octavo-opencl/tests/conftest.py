"""A tiny random llama that never ends on its own, and engines that serve it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import LLM

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
MakeLLM = Callable[..., LLM]


def _weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
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
        weights |= {f"{at}.mlp.{name}.weight": random(*shape) for name, shape in shapes_mlp.items()}
        weights |= {f"{at}.{name}.weight": torch.ones(48) for name in ("input_layernorm", "post_attention_layernorm")}
    return weights


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout; a token is a byte."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(torch.Generator().manual_seed(0)), str(folder / "model.safetensors"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def make_llm(tiny_llama: Path) -> Iterator[MakeLLM]:
    """An engine on a platform, closed after the test."""
    made: list[LLM] = []

    def make(platform: str, model: str | Path = tiny_llama, **settings: Any) -> LLM:
        defaults = {"dtype": "float32", "num_threads": 1, "block_size": 8, "num_blocks_override": 64}
        made.append(LLM(model, platform=platform, **(defaults | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
