"""A tiny random llama with a byte-level tokenizer, written as hubs have models, and transformers' word on it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.sampling_params import SamplingParams

from .tiny_models import Tiny, base, reference_logits
from .vocabularies import byte_level, write_folder

__all__ = ["CHAT_TEMPLATE", "EOS_IDS", "PRECISIONS", "Oracle", "greedy", "write_tiny_llm"]

EOS_IDS = (1, 3)  # </s> and <|end|>
TIE = 1e-3  # two logits closer than this may be told apart otherwise by another order of summation
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


class Oracle:
    """What transformers computes, one request at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float32, after each token."""
        return reference_logits(self._model, token_ids)

    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, H] float32, the final hidden state of each token."""
        with torch.no_grad():
            states: torch.Tensor = self._model.model(torch.tensor([list(token_ids)])).last_hidden_state[0]
        return states

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V], after each token."""
        return self.logits(token_ids).log_softmax(-1)

    def greedy(self, prompt: Sequence[int], num_tokens: int, eos: Sequence[int] = ()) -> list[int]:
        """The most likely tokens after the prompt, up to and with the first end."""
        ids = list(prompt)
        while len(ids) < len(prompt) + num_tokens:
            ids.append(int(self.logits(ids)[-1].argmax()))
            if ids[-1] in eos:
                break
        return ids[len(prompt) :]

    def check_greedy(self, prompt: Sequence[int], found: Sequence[int]) -> None:
        """Assert that each of the tokens found is the best after those before it, near ties aside."""
        logits = self.logits([*prompt, *found])[len(prompt) - 1 : -1]
        assert len(logits) == len(found)
        short = logits.max(-1).values - logits.gather(-1, torch.tensor(found)[:, None])[:, 0]
        assert short.max() < TIE, f"token {int(short.argmax())} is {float(short.max()):.4f} short of the best"


def write_tiny_llm(folder: Path, **changes: Any) -> Oracle:
    """Write the model. `changes` are of its config; a vocab_size over the tokenizer's makes a padded head."""
    tokenizer = byte_level(add_bos=False)
    arguments = base(
        vocab_size=tokenizer.get_vocab_size(),
        num_hidden_layers=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Tiny("Llama", arguments | changes).save(folder)
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    write_folder(folder, tokenizer, config, generation_config__json=json.dumps({"eos_token_id": list(EOS_IDS)}))
    return Oracle(model)


def greedy(num_tokens: int, **params: Any) -> SamplingParams:
    """The best token, so many times."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **params)
