"""Tiny random models by transformers' own classes, written as folders, and their logits."""

import copy
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.model.files import ModelFiles

__all__ = ["Tiny", "base", "folder_files", "gguf_files", "reference_logits"]


@dataclass(frozen=True)
class Tiny:
    """A configuration: transformers' class name less its suffix, and the config's arguments."""

    name: str
    arguments: dict[str, Any]
    config_class: str = ""
    model_class: str = ""

    def config(self) -> Any:
        """Transformers' config."""
        config_class = getattr(transformers, self.config_class or f"{self.name}Config")
        return config_class(**copy.deepcopy(self.arguments))

    def make(self) -> Any:
        """A model with weights that matter: norms and biases away from 1 and 0."""
        logging.getLogger("transformers").setLevel(logging.ERROR)
        config = self.config()
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(transformers, self.model_class or f"{self.name}ForCausalLM")(config).eval().float()
        fan_in = -2 if self.name == "GPT2" else -1
        buffers = [(n, b) for n, b in model.named_buffers() if "correction_bias" in n]
        with torch.no_grad():
            for name, p in [*model.named_parameters(), *buffers]:
                if p.ndim == 1:
                    p.add_(torch.randn_like(p) * 0.2)
                else:
                    is_table = any(part in name for part in ("embed", "wte", "wpe"))
                    p.normal_(0, 0.5 if is_table else p.shape[fan_in] ** -0.5)
        return model

    def save(self, folder: Path) -> Any:
        """Write the model as a folder; returns transformers' model."""
        model = self.make()
        model.save_pretrained(folder)
        return model


def base(**changes: Any) -> dict[str, Any]:
    """Arguments that most configs share; a change to `...` leaves one out."""
    arguments = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {k: v for k, v in {**arguments, **changes}.items() if v is not ...}


def folder_files(folder: Path) -> ModelFiles:
    return ModelFiles(str(folder), "folder", folder, folder)


def gguf_files(path: Path) -> ModelFiles:
    return ModelFiles(str(path), "gguf", path, path)


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
