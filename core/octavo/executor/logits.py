"""Changes to one sequence's logits before its token is chosen: masks, biases, penalties.

Each sequence that asks for any has a `LogitsProcessor` of its own; it sees that sequence's tokens alone and
keeps its counts from step to step.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from octavo.sampling_params import SamplingParams
from octavo.text.grammar import GrammarState

__all__ = ["LogitsProcessor", "TokenCounts"]


class TokenCounts:
    """The distinct tokens of a sequence, each with the number of times it stands in the output."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        ids = np.unique(np.fromiter(prompt_ids, np.int64))
        self._place = {int(token): place for place, token in enumerate(ids)}
        self._ids = ids
        self._counts = np.zeros(len(ids), np.int32)

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):  # full: room for as many again
            room = max(64, place)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.int32)))
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[n] the distinct tokens of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """[n] how often each stands in the output; 0: in the prompt alone."""
        return self._counts[: len(self._place)]


class LogitsProcessor:
    """What one sequence's parameters do to a row of logits, in this order: masks, logit_bias, penalties.

    `grammar` is the state of its structured output, if it has one, after the tokens of `output_ids`.

    Ids outside the vocabulary are ignored wherever they come from: they are never sampled anyhow.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
    ) -> None:
        def known(ids: Iterable[int]) -> npt.NDArray[np.int64]:
            return np.asarray(sorted({i for i in ids if 0 <= i < vocab_size}), np.int64)

        self._params = params
        self._num_output = 0
        self._allowed = None if params.allowed_token_ids is None else known(params.allowed_token_ids)
        self._ends = known((*eos_token_ids, *params.stop_token_ids))
        self._eos = known(eos_token_ids)
        bias = params.logit_bias or {}
        self._biased = known(bias)
        self._bias = np.asarray([bias[int(i)] for i in self._biased], np.float32)

        words = [word for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size]
        self._bad_tokens = known(word[0] for word in words if len(word) == 1)
        self._bad_words = [word for word in words if len(word) > 1]
        self._tail: deque[int] = deque(prompt_ids, maxlen=max((len(word) - 1 for word in self._bad_words), default=0))

        penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        self._counts = TokenCounts(i for i in prompt_ids if i < vocab_size) if penalised else None
        self._grammar: GrammarState | None = None
        for token_id in output_ids:
            self.append(token_id)
        self._grammar = grammar

    def append(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self._num_output += 1
        if self._grammar is not None:
            self._grammar.append(token_id)
        self._tail.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)

    def apply(self, logits: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """Fill out [V] from logits [V], which stay as they are; what is masked becomes -inf.

        Raises:
            RequestError: the structured output cannot go on.

        """
        if self._allowed is None:
            out[:] = logits
        else:
            out.fill(-np.inf)
            out[self._allowed] = logits[self._allowed]
        out[self._bad_tokens] = -np.inf
        if self._bad_words:
            out[self._forbidden_now()] = -np.inf
        if self._grammar is not None:
            self._grammar.mask(out)
            if self._grammar.is_waiting:
                out[self._eos] = -np.inf
        if self._num_output < self._params.min_tokens:
            self._hold_off_ends(out)
        out[self._biased] += self._bias
        if self._counts is not None:
            self._penalise(self._counts, out)

    def _hold_off_ends(self, out: npt.NDArray[np.float32]) -> None:
        """Mask the ends, unless the structured output is complete and nothing but an end may come."""
        ends = out[self._ends]
        out[self._ends] = -np.inf
        if self._grammar is not None and out.max() == -np.inf:
            out[self._ends] = ends

    def _forbidden_now(self) -> list[int]:
        """Last ids of the bad words whose other ids the sequence ends with."""
        tail = tuple(self._tail)
        return [word[-1] for word in self._bad_words if tail[len(tail) - len(word) + 1 :] == word[:-1]]

    def _penalise(self, seen: TokenCounts, out: npt.NDArray[np.float32]) -> None:
        """Repetition over prompt and output (Keskar et al. 2019); presence and frequency over the output."""
        params = self._params
        scores, counts = out[seen.ids], seen.counts.astype(np.float32)
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            scores[:] = np.where(scores > 0, scores / penalty, scores * penalty)
        if params.presence_penalty:
            scores -= np.float32(params.presence_penalty) * np.sign(counts)
        if params.frequency_penalty:
            scores -= np.float32(params.frequency_penalty) * counts
        out[seen.ids] = scores
