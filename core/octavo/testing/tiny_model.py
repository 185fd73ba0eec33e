"""A tiny random llama, made in code and written as hubs have models, and its float64 truth."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.testing.outcome import require

__all__ = ["TinyModel", "write_tiny_model"]

VOCAB, HIDDEN, WIDTH, NUM_LAYERS = 256, 64, 96, 2
NUM_HEADS, NUM_KV_HEADS = 4, 2
MAX_POSITION = 512
EPS, THETA = 1e-5, 10000.0

# Two logits closer than this may change places with the order of summation.
TIES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.6}


@dataclass(frozen=True)
class TinyModel:
    """The model in one dtype: weights are as that dtype rounds them, arithmetic is float64.

    Attributes:
        folder: in Hugging Face layout; a token is a byte.
        head_size: of its heads.
        dtype: in which it is served.
        weights: by their names in the checkpoint, float64.

    """

    folder: Path
    head_size: int
    dtype: torch.dtype
    weights: dict[str, torch.Tensor]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float64, after each token."""
        w = self.weights
        x = w["model.embed_tokens.weight"][list(token_ids)]
        for i in range(NUM_LAYERS):
            at = f"model.layers.{i}."
            x = x + self._attention(_norm(x, w[f"{at}input_layernorm.weight"]), f"{at}self_attn.")
            h = _norm(x, w[f"{at}post_attention_layernorm.weight"])
            gate, up = h @ w[f"{at}mlp.gate_proj.weight"].T, h @ w[f"{at}mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T
        return _norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T

    def check_greedy(self, prompt: Sequence[int], found: Sequence[int]) -> None:
        """Each of the tokens found is the best after those before it, near ties aside.

        Raises:
            CheckError: one is not.

        """
        logits = self.logits([*prompt, *found])[len(prompt) - 1 : -1]
        short = logits.max(-1).values - logits.gather(-1, torch.tensor(found)[:, None])[:, 0]
        at = int(short.argmax())
        said = f"token {found[at]} at output position {at} is {float(short[at]):.4f} below the best logit"
        require(float(short[at]) < TIES[self.dtype], f"{said}, {TIES[self.dtype]:g} is allowed")

    def _attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        num_tokens, size = len(x), self.head_size
        q, k, v = ((x @ self.weights[f"{at}{name}_proj.weight"].T).view(num_tokens, -1, size) for name in "qkv")
        q, k = _turn(q), _turn(k)
        k, v = (part.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * size**-0.5
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", seen, v).flatten(1) @ self.weights[f"{at}o_proj.weight"].T


def write_tiny_model(folder: Path, *, head_size: int, dtype: torch.dtype) -> TinyModel:
    """Write the model into a folder; the same for the same sizes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": head_size,
        "intermediate_size": WIDTH,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.to(dtype) for name, weight in _weights(head_size).items()}
    save_file(weights, str(folder / "model.safetensors"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return TinyModel(folder, head_size, dtype, {name: weight.double() for name, weight in weights.items()})


def _weights(head_size: int) -> dict[str, torch.Tensor]:
    """Large enough for queries to single out keys, so that a wrong block changes tokens."""
    draw = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * (1.5 / math.sqrt(columns))

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=draw)

    q, kv = NUM_HEADS * head_size, NUM_KV_HEADS * head_size
    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN) * 5,
        "model.norm.weight": norm(),
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    shapes = {"q_proj": (q, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN), "o_proj": (HIDDEN, q)}
    shapes_mlp = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    for i in range(NUM_LAYERS):
        at = f"model.layers.{i}"
        weights |= {f"{at}.self_attn.{name}.weight": random(*shape) for name, shape in shapes.items()}
        weights |= {f"{at}.mlp.{name}.weight": random(*shape) for name, shape in shapes_mlp.items()}
        weights |= {f"{at}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
    return weights


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x * scale * weight


def _turn(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, each pair (i, i + half) as one complex number."""
    num_tokens, _, size = x.shape
    angles = np.outer(np.arange(num_tokens), THETA ** (-np.arange(0, size, 2) / size))
    turn = torch.from_numpy(np.exp(1j * angles))[:, None]
    pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)
