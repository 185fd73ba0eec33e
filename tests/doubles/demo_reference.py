"""The demo model in transformers, in float32: the truth that the engine is held against."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.gguf_file import GGUFFile
from octavo.model.gguf import GGUFCheckpoint

__all__ = ["check_greedy", "demo_in_transformers"]

TOLERANCE = 1e-3  # two logits closer than this may be ranked either way

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def demo_in_transformers(demo_file: Path) -> LlamaForCausalLM:
    """Transformers' model, filled by hand: its own reading of GGUF files takes a minute."""
    checkpoint = GGUFCheckpoint(GGUFFile(demo_file))
    state = {
        "model.embed_tokens.weight": checkpoint.read("token_embd.weight"),
        "model.norm.weight": checkpoint.read("output_norm.weight"),
    }
    for i in range(30):
        for theirs, ours in NAMES.items():
            tensor = checkpoint.read(f"blk.{i}.{theirs}.weight")
            if theirs in ("attn_q", "attn_k"):  # undo llama.cpp's permutation
                tensor = tensor.view(-1, 32, 2, 576).transpose(1, 2).reshape(tensor.shape)
            state[f"model.layers.{i}.{ours}.weight"] = tensor
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are buffers, on no device yet
    return model.eval()


@torch.inference_mode()
def check_greedy(model: torch.nn.Module, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int] = ()) -> int:
    """Assert that `output` is what `model` says at temperature 0 after `prompt`, read along token by token.

    Where the tokens part, the model's two best logits must be closer than the tolerance. Returns the number of
    such positions.
    """
    assert output, "no token was generated"
    ids = [*prompt, *output]
    logits = model(torch.tensor([ids[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.argmax(-1).tolist()
    near = 0
    for position, (wanted, got) in enumerate(zip(best, output, strict=True)):
        if wanted != got:
            gap = float(logits[position, wanted] - logits[position, got])
            assert gap < TOLERANCE, f"token {position} is {got}, transformers says {wanted}, {gap} ahead"
            near += 1
        if got in eos:
            assert position == len(output) - 1, "went on past the end of sequence"
    return near
