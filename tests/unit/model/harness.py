"""Our program beside transformers' on the same tiny model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doubles.paged_program import Paged
from doubles.tiny_models import Tiny, folder_files, reference_logits

from octavo.model.describe import describe_native
from octavo.model.description import NativeModel


def check_parity(
    tiny: Tiny,
    folder: Path,
    *,
    max_model_len: int | None = 64,
    lengths: Sequence[int] = (48, 19, 33),
    tol: float = 1e-4,
) -> NativeModel:
    """Whole, in chunks of 17, and batched with others, our logits equal transformers'."""
    model = tiny.save(folder)
    description = describe_native(folder_files(folder), max_model_len)
    compare(Paged(description, max_model_len=max_model_len or 64), model, lengths, tol)
    return description


def compare(paged: Paged, model: Any, lengths: Sequence[int] = (48, 19, 33), tol: float = 1e-4) -> None:
    generator = np.random.default_rng(1)
    texts = [generator.integers(0, 160, n).tolist() for n in lengths]
    expected = [reference_logits(model, text) for text in texts]
    for text, want in zip(texts, expected, strict=True):
        torch.testing.assert_close(paged.whole(text), want, atol=tol, rtol=tol)
    torch.testing.assert_close(paged.chunked(texts[0], 17), expected[0], atol=tol, rtol=tol)
    # The first is ahead by one chunk and decodes token by token while the others come in beside it.
    sequences = [paged.begin(text) for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    ahead = 20
    found[0] += paged.step([(sequences[0], ahead)])
    others = [(i, n) for i in range(1, len(texts)) for n in [len(texts[i])]]
    plan = [[(0, 1), *((i, min(17, n)) for i, n in others)], [(0, 1), *((i, n - 17) for i, n in others if n > 17)]]
    plan += [[(0, 1)] for _ in range(len(texts[0]) - ahead - len(plan))]
    for work in plan:
        for (i, _), logits in zip(work, paged.step([(sequences[i], n) for i, n in work]), strict=True):
            found[i].append(logits)
    for parts, want in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), want, atol=tol, rtol=tol)
    paged.end(*sequences)
