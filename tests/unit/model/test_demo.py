"""The demo model over paged blocks gives the logits of transformers' Llama with the same weights."""

from pathlib import Path

import torch
from doubles.paged_program import Paged
from doubles.tiny_models import folder_files, gguf_files, reference_logits
from transformers import LlamaForCausalLM

from octavo.model.describe import describe_model


@torch.no_grad()
def test_logits_equal_those_of_transformers(demo_file: Path, demo_reference: LlamaForCausalLM) -> None:
    paged = Paged(describe_model(gguf_files(demo_file), 64))
    token_ids = [504, 3575, 282, 4649, 314] + [(17 * i * i + 3) % 49152 for i in range(25)]
    want = reference_logits(demo_reference, token_ids)
    assert want.abs().max() > 10
    torch.testing.assert_close(paged.whole(token_ids), want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(paged.chunked(token_ids, 17), want, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_the_model_as_a_folder_gives_the_logits_of_its_file(
    demo_file: Path, demo_reference: LlamaForCausalLM, tmp_path: Path
) -> None:
    demo_reference.save_pretrained(tmp_path)
    token_ids = [504, 3575, 282, 4649, 314] + [(29 * i * i + 7) % 49152 for i in range(25)]
    from_file = Paged(describe_model(gguf_files(demo_file), 64)).whole(token_ids)
    from_folder = Paged(describe_model(folder_files(tmp_path), 64)).whole(token_ids)
    torch.testing.assert_close(from_folder, from_file, atol=1e-4, rtol=0)
