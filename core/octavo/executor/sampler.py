"""Chooses tokens from rows of logits. A row's token depends on that row, its parameters and its random number.

Masks, logit_bias and penalties are applied here, a row at a time. Then the op `sample` draws, many rows at a time:
temperature, min_p, top_k and top_p, and one random number. The op is defined to the bit, so whoever serves it, a
request's tokens are the same, alone and in any batch.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import Sample, reference
from octavo.errors import RequestError
from octavo.executor.logits import LogitsProcessor
from octavo.executor.philox import uniforms
from octavo.executor.step_rows import NOT_NUMBERS
from octavo.sampling_params import SamplingParams

__all__ = ["Draw", "RowError", "Sampler"]

Floats = npt.NDArray[np.float32]

CHUNK = 16  # rows that are masked or penalised before they are drawn from: more would take much memory
UNDRAWN = -1  # by the op: the row holds no numbers

logger = logging.getLogger(__name__)


class RowError(Exception):
    """A row from which no token can be chosen; ends its own sequence and nothing else.

    `param` names the parameter that leaves none, or is None where it is the model's or our fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Draw:
    """One token to choose.

    Attributes:
        logits: [V] float32, at least as long as the tokenizer's vocabulary; not written to.
        params: of the request.
        sample_index: which of its samples.
        position: number of output tokens that the sample has already.
        processor: its masks, biases and penalties, where it has any.
        row: which of the step's logits they are; None: of none.

    """

    logits: Floats
    params: SamplingParams
    sample_index: int
    position: int
    processor: LogitsProcessor | None = None
    row: int | None = None


class Sampler:
    """Chooses tokens below `vocab_size`, the tokenizer's: rows of a padded head are longer.

    Its scratch rows are reused from call to call; nothing else is kept. `op` draws.
    """

    def __init__(self, vocab_size: int, op: Callable[[Sample], torch.Tensor] = reference.sample) -> None:
        self._vocab_size = vocab_size
        self._op = op
        self._processed = torch.empty((0, vocab_size), dtype=torch.float32)

    def sample(self, draws: Sequence[Draw], logits: torch.Tensor | None = None) -> list[int | RowError]:
        """A token id for each draw, or what is wrong with its row. Never raises for one of them.

        `logits` [L, V] float32 are those of the step, in which the rows of draws lie.
        """
        if not draws:
            return []
        numbers = uniforms(
            np.asarray([(draw.params.seed or 0) % 2**64 for draw in draws], np.uint64),
            np.asarray([draw.position for draw in draws], np.uint64),
            np.asarray([draw.sample_index for draw in draws], np.uint64),
        )
        tokens: list[int | RowError] = [UNDRAWN] * len(draws)
        plain: list[int] = []  # drawn from as they lie in `logits`
        others: list[int] = []
        for i, draw in enumerate(draws):
            is_plain = draw.processor is None and not draw.params.greedy and draw.params.seed is not None
            (plain if is_plain and draw.row is not None and logits is not None else others).append(i)
        if plain:
            assert logits is not None
            rows = [draws[i].row for i in plain]
            self._draw(logits[:, : self._vocab_size], rows, plain, draws, numbers, tokens)
        for start in range(0, len(others), CHUNK):
            self._choose(others[start : start + CHUNK], draws, numbers, tokens)
        return tokens

    def _choose(
        self,
        chosen: Sequence[int],
        draws: Sequence[Draw],
        numbers: npt.NDArray[np.float64],
        tokens: list[int | RowError],
    ) -> None:
        """Fill in the tokens of draws that are masked, penalised, greedy or of no row of the step."""
        if len(self._processed) < len(chosen):
            self._processed = torch.empty((len(chosen), self._vocab_size), dtype=torch.float32)
        rows = self._processed.numpy()
        drawn: list[int] = []
        for i in chosen:
            try:
                best = self._prepare(draws[i], rows[len(drawn)])
            except RowError as error:
                tokens[i] = error
            except RequestError as error:
                tokens[i] = RowError(str(error), error.param)
            except Exception as error:
                logger.exception("sampling failed")
                tokens[i] = RowError(f"sampling failed: {error}")
            else:
                if best is None:
                    drawn.append(i)
                else:
                    tokens[i] = best
        if drawn:
            self._draw(self._processed, range(len(drawn)), drawn, draws, numbers, tokens)

    def _prepare(self, draw: Draw, out: Floats) -> int | None:
        """The best token of a greedy draw; None: `out` [V] is what the token is to be drawn from."""
        logits, params = draw.logits[: self._vocab_size], draw.params
        if draw.processor is not None:
            draw.processor.apply(logits, out)
            logits = out
        if params.greedy:
            best = int(logits.argmax())  # the first NaN where there is one, else the lowest id of equals
            if not math.isfinite(logits[best]):
                raise _fault(logits, params)
            return best
        if params.seed is None:
            raise RowError("the request has no seed; one is drawn at admission")
        if logits is not out:
            out[:] = logits
        return None

    def _draw(
        self,
        logits: torch.Tensor,
        rows: Sequence[int | None],
        drawn: Sequence[int],
        draws: Sequence[Draw],
        numbers: npt.NDArray[np.float64],
        tokens: list[int | RowError],
    ) -> None:
        """Fill in the tokens of the draws `drawn`, each from its row of logits."""
        params = [draws[i].params for i in drawn]
        whole = torch.from_numpy(np.asarray([rows, [p.top_k for p in params]], np.int64))
        wishes = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        temperature, top_p, min_p, uniform = torch.from_numpy(np.asarray([*wishes, numbers[drawn]], np.float64))
        args = Sample(logits, whole[0], temperature, whole[1], top_p, min_p, uniform)
        try:
            found = self._op(args)
        except Exception:
            logger.exception("the platform's op sample failed; core's own draws from now on")
            self._op = reference.sample
            found = self._op(args)
        for i, row, token_id in zip(drawn, rows, found.tolist(), strict=True):
            tokens[i] = _fault(logits[row].numpy(), draws[i].params) if token_id == UNDRAWN else token_id


def _fault(logits: Floats, params: SamplingParams) -> RowError:
    """Why no token can be chosen from a row."""
    masks = params.masks
    if logits.max() == -np.inf:
        named = ", ".join(masks) or "the request has none"
        return RowError(f"masks leave no token that may be sampled ({named})", masks[0] if masks else None)
    return RowError(NOT_NUMBERS)
