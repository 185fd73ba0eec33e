"""Slots, KV groups and name tables."""

import pytest
import torch

from octavo.contract import Attention, DecoderSpec, LatentAttention, Layer, Mlp, Norm, Rope
from octavo.model.families import FAMILIES
from octavo.model.kv_groups import kv_groups
from octavo.model.names import REORDER, NameTable
from octavo.model.slots import Slot, slots

NORM = Norm(1e-5)
ROPE = Rope((1.0, 0.5))
FULL = Attention(4, 2, 8, 0.3, ROPE)
SLIDING = Attention(4, 2, 8, 0.3, Rope((1.0, 0.1)), window=16)
LATENT = LatentAttention(4, 24, 16, 8, 12, 0.2, ROPE, NORM)


def spec(*attns: Attention | LatentAttention, tied: bool = True) -> DecoderSpec:
    layers = tuple(Layer(attn, Mlp(40, "silu"), attn_pre=NORM, mlp_pre=NORM) for attn in attns)
    return DecoderSpec(100, 32, layers, NORM, tied)


def test_slots_of_a_plain_layer() -> None:
    found = {slot.name: slot.shape for slot in slots(spec(FULL, tied=False))}
    assert found == {
        "embedding": (100, 32),
        "layers.0.attn_pre": (32,),
        "layers.0.attn.qkv": (64, 32),
        "layers.0.attn.o": (32, 32),
        "layers.0.mlp_pre": (32,),
        "layers.0.mlp.up": (80, 32),
        "layers.0.mlp.down": (32, 40),
        "final_norm": (32,),
        "head": (100, 32),
    }
    assert "head" not in {slot.name for slot in slots(spec(FULL))}


def test_slots_of_latent_attention() -> None:
    found = {slot.key: slot.shape for slot in slots(spec(LATENT)) if slot.key.startswith("attn.")}
    assert found == {
        "attn.q_a": (24, 32),
        "attn.q_a_norm": (24,),
        "attn.q": (48, 24),
        "attn.kv_a": (20, 32),
        "attn.kv_a_norm": (16,),
        "attn.kv_b": (80, 16),
        "attn.o": (32, 48),
    }


def test_names_split_into_layer_and_key() -> None:
    assert [(s.layer, s.key) for s in slots(spec(FULL))][:3] == [(None, "embedding"), (0, "attn_pre"), (0, "attn.qkv")]


def test_layers_of_one_geometry_share_a_group() -> None:
    groups = kv_groups(
        spec(SLIDING, FULL, SLIDING, LATENT), block_size=16, dtype=torch.bfloat16, kv_dtype=torch.float32
    )
    assert [group.layers for group in groups] == [(0, 2), (1,), (3,)]
    assert [group.spec.num_layers for group in groups] == [2, 1, 1]
    assert [group.spec.window for group in groups] == [16, None, None]
    latent = groups[2].spec
    assert (latent.num_heads, latent.num_kv_heads, latent.head_size, latent.value_size) == (4, 1, 20, 16)
    assert latent.latent
    assert (latent.dtype, latent.kv_dtype, latent.block_size) == (torch.bfloat16, torch.float32, 16)


def test_rope_does_not_part_a_group() -> None:
    other = Attention(4, 2, 8, 0.3, None)
    groups = kv_groups(spec(FULL, other), block_size=8, dtype=torch.float32, kv_dtype=torch.float32)
    assert [group.layers for group in groups] == [(0, 1)]


def test_entries_have_alternatives_parts_and_steps() -> None:
    table = NameTable({"layer": "h.{i}.", "attn.qkv": "a.q a.k | c:transpose,even_rows_first"})
    options = table.options(Slot("layers.3.attn.qkv", (1, 1)))
    assert [[part.name for part in option] for option in options] == [["h.3.a.q", "h.3.a.k"], ["h.3.c"]]
    packed = options[1][0]
    assert packed.transpose
    assert packed.reorder == "even_rows_first"
    assert table.options(Slot("layers.3.mlp.up", (1, 1))) == []


@pytest.mark.parametrize(
    ("step", "head_size", "order"),
    [
        ("even_rows_first", 0, [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]),
        ("split_heads", 2, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]),
        ("rope_halves", 4, [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]),
    ],
)
def test_rows_are_reordered(step: str, head_size: int, order: list[int]) -> None:
    assert REORDER[step](torch.arange(12), head_size).flatten().tolist() == order


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tables_name_no_slot_that_is_not(model_type: str) -> None:
    """A misspelt key of a table would never be asked for."""
    known = {"layer", "embedding", "positions", "embedding_norm", "final_norm", "head"}
    known |= {"attn_pre", "attn_post", "mlp_pre", "mlp_post", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.sinks"}
    known |= {"attn.o", "mlp.up", "mlp.down", "moe.router", "moe.correction", "moe.up", "moe.down"}
    known |= {"shared.up", "shared.down", "shared.gate"}
    known |= {f"attn.{part}" for part in ("q_a", "q_a_norm", "q", "kv_a", "kv_a_norm", "kv_b")}
    assert set(FAMILIES[model_type].names) <= known
