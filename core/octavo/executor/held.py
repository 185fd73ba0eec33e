"""A sequence that the executor holds: what sampling needs of it. Its tokens and blocks are in the store."""

from collections.abc import Sequence

from octavo.contract import RowMode
from octavo.errors import RequestError
from octavo.executor.logits import LogitsProcessor
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import NewSequence
from octavo.text.grammar import GrammarCompiler, GrammarState

__all__ = ["HeldSequence"]


class HeldSequence:
    """One sequence, from its addition to its removal.

    Attributes:
        origin: as the scheduler introduced it.
        processor: its masks, biases and penalties, where it has any.
        fault: why no token can be chosen, if so.
        mode: what the program is asked for where a token is drawn.

    """

    def __init__(
        self, new: NewSequence, vocab_size: int, *, picks_greedy: bool, grammars: GrammarCompiler | None
    ) -> None:
        self.origin = new
        self.seq_id = new.seq_id
        self.params = params = new.params
        self.processor: LogitsProcessor | None = None
        self.fault: RequestError | None = None
        if params.changes_logits:
            prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
            grammar = None
            try:
                grammar = _grammar_of(params, output, grammars)
            except RequestError as error:
                self.fault = error
            self.processor = LogitsProcessor(params, new.eos_token_ids, prompt, output, vocab_size, grammar)
        is_plain = params.greedy and self.processor is None and params.logprobs is None
        self.mode = RowMode.GREEDY if is_plain and picks_greedy else RowMode.LOGITS

    @property
    def asks_of_prompt(self) -> bool:
        """Whether its prompt is scored or pooled."""
        return self.origin.prompt_logprobs_from is not None or len(self.origin.pooled) > 0

    def scored(self, start: int, num_tokens: int) -> range:
        """Prompt positions whose log-probability a piece of so many tokens gives."""
        wanted_from = self.origin.prompt_logprobs_from
        if wanted_from is None:
            return range(0)
        # Position p gives the distribution of token p + 1; the first prompt token has none.
        first = max(wanted_from, start + 1)
        return range(first, max(first, min(start + num_tokens + 1, self.origin.num_prompt_tokens)))

    def pooled(self, start: int, num_tokens: int) -> range:
        """Prompt positions whose hidden states a piece of so many tokens sums up."""
        first = max(self.origin.pooled.start, start)
        return range(first, max(first, min(start + num_tokens, self.origin.pooled.stop)))


def _grammar_of(
    params: SamplingParams, output_ids: Sequence[int], grammars: GrammarCompiler | None
) -> GrammarState | None:
    if params.structured is None:
        return None
    if grammars is None:
        raise RequestError("this engine was made without a compiler of structured outputs", "structured")
    return grammars.compile(params.structured).begin(output_ids)
