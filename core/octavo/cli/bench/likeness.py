"""How like a model in one precision is to itself in float32: surprises of a text, and likeliest tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.errors import ConfigError, OctavoError
from octavo.sampling_params import SamplingParams

__all__ = ["Comparison", "Workload", "compare"]

Floats = npt.NDArray[np.float64]
REFERENCE = {"dtype": "float32", "kv_cache_dtype": "auto", "quantization": "none", "calibration_file": None}


@dataclass(frozen=True)
class Workload:
    """How much is compared; lengths are in tokens."""

    num_texts: int = 16
    text_len: int = 512
    num_prompts: int = 200
    prompt_len: int = 32
    output_len: int = 32

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with the one that each must generate."""
        return max(self.text_len, self.prompt_len + self.output_len) + 1


@dataclass(frozen=True)
class Scores:
    """What a model says of every token but the first of some sequences of one length: [sequences, tokens - 1].

    Attributes:
        surprise: minus the log-probability of the token that stands there.
        best: the id of the likeliest.
        gap: by how much the best logit leads the second best.

    """

    surprise: Floats
    best: npt.NDArray[np.int64]
    gap: Floats


@dataclass(frozen=True)
class Comparison:
    """A precision beside the reference.

    Attributes:
        reference, precision: what they are, in words.
        perplexity, reference_perplexity: of the text.
        growth: of perplexity, in percent; `uncertainty` is its standard error over pieces of text.
        num_positions, num_parted: at which likeliest tokens are compared, and where they differ.
        gaps: of the reference, where they differ, largest first.

    """

    reference: str
    precision: str
    reference_perplexity: float
    perplexity: float
    growth: float
    uncertainty: float
    num_positions: int
    num_parted: int
    gaps: list[float] = field(default_factory=list)

    @property
    def largest_gap(self) -> float:
        """0 where all likeliest tokens agree."""
        return max(self.gaps, default=0.0)

    def lines(self) -> Iterator[str]:
        """For readers."""
        yield f"reference   {self.reference}"
        yield f"precision   {self.precision}"
        change = f"{self.growth:+.2f}% (+-{self.uncertainty:.2f})"
        yield f"perplexity  {self.perplexity:.3f}, reference {self.reference_perplexity:.3f}: {change}"
        agreed = 100 * (1 - self.num_parted / self.num_positions)
        yield f"agreement   {agreed:.2f}% of {self.num_positions} likeliest tokens"
        wide = sum(gap >= 0.1 for gap in self.gaps)
        yield f"largest gap {self.largest_gap:.3f}; {wide} of {self.num_parted} that part are at 0.1 or more"

    def unmet(self, max_growth: float | None, max_gap: float | None) -> Iterator[str]:
        """Demands that are not met, a line each."""
        if max_growth is not None and not self.growth <= max_growth:
            yield f"perplexity grows by {self.growth:.2f}%, {max_growth:g}% is allowed"
        if max_gap is not None and not self.largest_gap <= max_gap:
            yield f"tokens part at a gap of {self.largest_gap:.3f}, {max_gap:g} is allowed"


def compare(config: EngineConfig, reference: str, text: str | None, workload: Workload) -> Comparison:
    """Score the same tokens with the reference and with `config`; one of them is loaded at a time.

    Args:
        config: the precision that is judged.
        reference: "octavo" or "transformers".
        text: a file, or None for Python's manual.
        workload: how much.

    Raises:
        ConfigError: the text is too short, or cannot be read.

    """
    sizes = {"max_model_len": max(workload.longest, config.model.max_model_len or 0)}
    config = config.but(**sizes)
    with LLM(config=config.but(**REFERENCE)) as llm:
        texts, prompts = _sequences(llm.tokenizer.encode(_text(text)), workload)
        if reference == "octavo":
            name = f"{config.model.model} in float32, by Octavo"
            outputs = _generated(llm, prompts, workload.output_len)
            truth, true_outputs = _scored(llm, texts), _scored(llm, outputs)
        folder = llm.description.files.path
    if reference == "transformers":
        name = f"{config.model.model} in float32, by transformers"
        model = _transformers(folder)
        outputs = _continued(model, prompts, workload.output_len)
        truth, true_outputs = _read(model, texts), _read(model, outputs)
        del model
    with LLM(config=config) as llm:
        precision = f"{llm.config.model.dtype}; weights: {llm.executor.facts()['weights']}"
        found, found_outputs = _scored(llm, texts), _scored(llm, outputs)
    by_text = (found.surprise - truth.surprise).mean(1)
    after_prompt = slice(workload.prompt_len - 1, None)
    parted = (found_outputs.best != true_outputs.best)[:, after_prompt]
    return Comparison(
        reference=name,
        precision=precision,
        reference_perplexity=exp(truth.surprise.mean()),
        perplexity=exp(found.surprise.mean()),
        growth=100 * (exp(by_text.mean()) - 1),
        uncertainty=100 * float(by_text.std(ddof=1)) / sqrt(len(by_text)) if len(by_text) > 1 else 0.0,
        num_positions=parted.size,
        num_parted=int(parted.sum()),
        gaps=sorted(true_outputs.gap[:, after_prompt][parted].tolist(), reverse=True),
    )


def _text(file: str | None) -> str:
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the text {file}: {error}") from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _sequences(token_ids: Sequence[int], workload: Workload) -> tuple[list[list[int]], list[list[int]]]:
    """Texts and prompts, cut at even distances; prompts lie between texts as far as there is room."""

    def cut(number: int, length: int, shift: float) -> list[list[int]]:
        room = len(token_ids) - length
        if room < number:
            raise ConfigError(f"the text has {len(token_ids)} tokens, too few for {number} pieces of {length}")
        starts = [int((i + shift) * room / number) for i in range(number)]
        return [list(token_ids[start : start + length]) for start in starts]

    return cut(workload.num_texts, workload.text_len, 0.0), cut(workload.num_prompts, workload.prompt_len, 0.5)


# ---- by Octavo


def _run(llm: LLM, sequences: Sequence[list[int]], params: SamplingParams) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": one} for one in sequences], params)
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed:
        raise OctavoError(failed)
    return outputs


def _generated(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = _run(llm, prompts, params)
    return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]


def _scored(llm: LLM, sequences: Sequence[list[int]]) -> Scores:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
    rows = []
    for ids, output in zip(sequences, _run(llm, sequences, params), strict=True):
        told = zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        rows.append([_position(token_id, at) for token_id, at in told])
    table = np.array(rows, np.float64)
    return Scores(table[..., 0], table[..., 1].astype(np.int64), table[..., 2])


def _position(token_id: int, told: Any) -> tuple[float, int, float]:
    by_rank = sorted((one.rank, token, one.logprob) for token, one in told.items())
    (_, best, first), (_, _, second) = by_rank[:2]
    return -told[token_id].logprob, best, first - second


# ---- by transformers


def _transformers(folder: Path) -> Any:
    import transformers

    if not folder.is_dir():
        raise ConfigError(f"reference transformers reads folders in Hugging Face layout, {folder} is none")
    library: Any = transformers  # parts of it have no types
    library.utils.logging.disable_progress_bar()
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = library.GenerationConfig(do_sample=False)  # no penalties, no end
    return model


def _continued(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedily, some prompts at a time."""

    def one_batch(ids: torch.Tensor) -> torch.Tensor:
        continued: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)
        return continued

    return [row for batch in _batches(prompts, 32, one_batch) for row in batch.tolist()]


def _read(model: Any, sequences: Sequence[list[int]]) -> Scores:
    def one_batch(ids: torch.Tensor) -> Scores:
        logits = model(ids).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        top = logits.topk(2, -1)
        gap = top.values[..., 0] - top.values[..., 1]
        return Scores(-chosen.double().numpy(), top.indices[..., 0].numpy(), gap.double().numpy())

    parts = list(_batches(sequences, max(1, 1024 // len(sequences[0])), one_batch))
    return Scores(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("surprise", "best", "gap")))


def _batches(sequences: Sequence[list[int]], size: int, run: Callable[[torch.Tensor], Any]) -> Iterator[Any]:
    with torch.inference_mode():
        for start in range(0, len(sequences), size):
            yield run(torch.tensor(sequences[start : start + size]))
