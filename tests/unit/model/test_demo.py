"""The demo model over paged blocks gives the logits of transformers' Llama with the same weights."""

from pathlib import Path

import pytest
import torch
from doubles.paged_program import Paged
from doubles.tiny_models import gguf_files, reference_logits
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.gguf_file import GGUFFile
from octavo.model.describe import describe_model
from octavo.model.gguf import GGUFCheckpoint

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


@pytest.fixture(scope="module")
def reference(demo_file: Path) -> LlamaForCausalLM:
    """transformers' model, filled by hand: its own reading of GGUF files takes a minute."""
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


@torch.no_grad()
def test_logits_equal_those_of_transformers(demo_file: Path, reference: LlamaForCausalLM) -> None:
    paged = Paged(describe_model(gguf_files(demo_file), 64))
    token_ids = [504, 3575, 282, 4649, 314] + [(17 * i * i + 3) % 49152 for i in range(25)]
    want = reference_logits(reference, token_ids)
    assert want.abs().max() > 10
    torch.testing.assert_close(paged.whole(token_ids), want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(paged.chunked(token_ids, 17), want, atol=2e-4, rtol=1e-4)
