"""A platform on the bench: what the checks of one run share."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from octavo.contract import AttentionBackend, Capabilities, OpImpl, Platform, PlatformInfo
from octavo.contract.reference import reference_ops
from octavo.engine.llm import LLM
from octavo.hardware.choose import choose_platform, create_platform, portable_ops
from octavo.hardware.registry import Plugin, Registry, discover
from octavo.sampling_params import SamplingParams
from octavo.testing.outcome import require
from octavo.testing.tiny_model import MAX_POSITION, TinyModel, write_tiny_model

__all__ = ["PROMPTS", "Bench", "Sample"]

PROMPTS = [list(text) for text in (b"the quick brown fox jumps over", b"hi", b"abc" * 9, b"a longer prompt " * 3)]
SMALL_HEAD = 64  # the commonest size of a head

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)


@dataclass(frozen=True)
class Sample:
    """Tokens, and the log-probability of each: equal bits of logits give equal ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Bench:
    """The platform of a name on one device, and a tiny model in a folder that goes with it.

    Nothing is done before the first check asks for it. Use as a context manager.

    Args:
        platform: as `--platform` takes it.
        device: index.

    """

    def __init__(self, platform: str, device: int = 0) -> None:
        self.name = platform
        self.device_index = device
        self.row_invariant = False  # whether the whole chain claims it; known once there is a baseline
        self._exit = ExitStack()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @cached_property
    def registry(self) -> Registry:
        """All plugins; broken ones are of no concern here, since the platform is named."""
        return discover()

    @cached_property
    def info(self) -> PlatformInfo:
        """What the plugin says of the platform. PlatformError where it is unknown or cannot serve here."""
        return choose_platform(self.registry, self.name)

    @property
    def plugin(self) -> Plugin:
        """Who brings the platform."""
        return self.registry.plugin_of(self.info.name)

    @cached_property
    def platform(self) -> Platform:
        """The platform itself, on one thread where it asks: a check's work is tiny."""
        platform = create_platform(self.info, self.device_index)
        platform.set_num_threads(1)
        return platform

    @cached_property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self.platform.capabilities()

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self.platform.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """In which behaviour is checked: float32, where errors show best, or what the platform prefers."""
        dtypes = self.capabilities.dtypes
        return torch.float32 if torch.float32 in dtypes or not dtypes else dtypes[0]

    @cached_property
    def shared_ops(self) -> list[OpImpl]:
        """What plugins offer to this platform."""
        return portable_ops(self.registry, self.platform, self.name)

    @cached_property
    def own_ops(self) -> list[OpImpl]:
        """What the platform offers."""
        return list(self.platform.ops())

    @property
    def all_ops(self) -> list[OpImpl]:
        """Everything that may serve on it, the references too: torch itself may be wrong on a device."""
        return [*self.own_ops, *self.shared_ops, *reference_ops()]

    @cached_property
    def backends(self) -> list[AttentionBackend]:
        """The platform's own attention."""
        return list(self.platform.attention_backends())

    @property
    def block_size(self) -> int:
        """The preferred number of tokens a block."""
        return next(iter(self.capabilities.block_sizes), 16)

    @cached_property
    def model(self) -> TinyModel:
        """The tiny model, on a head size that the platform has kernels for."""
        sizes = self.capabilities.head_sizes
        size = SMALL_HEAD if SMALL_HEAD in sizes or not sizes else sizes[0]
        folder = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="octavo-conformance-"))
        return write_tiny_model(Path(folder), head_size=size, dtype=self.dtype)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Of an engine for the tiny model."""
        # Room for all the prompts and their outputs, and no more: memory is filled on purpose elsewhere.
        return {
            "model": self.model.folder,
            "platform": self.name,
            "device": self.device_index,
            "dtype": str(self.dtype).removeprefix("torch."),
            "num_threads": 1,
            "max_num_seqs": 8,
            "max_model_len": MAX_POSITION,
            "num_blocks_override": -(-2 * MAX_POSITION // self.block_size) + 8,
            **changes,
        }

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[LLM]:
        """The tiny model on the platform, with some settings changed."""
        with _quiet(), LLM(**self.settings(**changes)) as llm:
            yield llm

    def outputs(
        self, llm: LLM, prompts: Sequence[list[int]] = PROMPTS, params: SamplingParams = GREEDY
    ) -> list[list[Sample]]:
        """The samples of each prompt.

        Raises:
            CheckError: a request failed.

        """
        found = []
        for output in llm.generate(list(prompts), params, use_tqdm=False):
            require(output.error is None, f"a request failed: {output.error}")
            found.append([self._sample(one.token_ids, one.logprobs) for one in output.outputs])
        return found

    @cached_property
    def baseline(self) -> list[list[Sample]]:
        """What the prompts give with every setting as it comes, once they were found right."""
        with self.engine() as llm:
            found = self.outputs(llm)
            self.row_invariant = bool(llm.executor.row_invariant)
        self.check_greedy(PROMPTS, found)
        return found

    def check_greedy(self, prompts: Sequence[list[int]], found: Sequence[Sequence[Sample]]) -> None:
        """Every token is the best one by the float64 truth."""
        for prompt, samples in zip(prompts, found, strict=True):
            for sample in samples:
                self.model.check_greedy(prompt, sample.token_ids)

    def check_like_baseline(self, found: list[list[Sample]], how: str) -> None:
        """Right by the truth; and bit by bit what the baseline is, where the platform claims row invariance.

        Raises:
            CheckError: they are not.

        """
        baseline = self.baseline
        self.check_greedy(PROMPTS, found)
        if not self.row_invariant:
            return
        for row, (one, other) in enumerate(zip(baseline, found, strict=True)):
            require(one == other, f"claims that rows do not depend on each other, and request {row} differs {how}")

    def _sample(self, token_ids: Sequence[int], logprobs: Sequence[Any] | None) -> Sample:
        told = () if logprobs is None else tuple(at[i].logprob for at, i in zip(logprobs, token_ids, strict=True))
        return Sample(tuple(token_ids), told)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log lines below an error are no part of a report."""
    logger = logging.getLogger("octavo")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
