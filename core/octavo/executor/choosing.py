"""From a step's rows to each sequence's new tokens: the best, or one drawn; and as many guesses as were right."""

from collections.abc import Sequence

import torch

from octavo.contract import RowMode, StepOutput
from octavo.executor.batch import SequenceStore
from octavo.executor.held import HeldSequence
from octavo.executor.logprobs import from_logits
from octavo.executor.sampler import Draw, RowError, Sampler
from octavo.executor.step_rows import NOT_NUMBERS, RowList, StepResult
from octavo.scheduler.messages import ScheduledSequence

__all__ = ["Choosing"]


class _Drawing:
    """A sequence that draws from rows of logits: its tokens so far, each from the row behind the one before."""

    __slots__ = ("drafts", "held", "num_output", "place", "token_ids")

    def __init__(self, held: HeldSequence, place: int, drafts: Sequence[int], num_output: int) -> None:
        self.held = held
        self.place = place
        self.drafts = drafts
        self.num_output = num_output
        self.token_ids: list[int] = []


class Choosing:
    """The tokens that one program call chooses."""

    def __init__(self, store: SequenceStore, sampler: Sampler, rows: RowList) -> None:
        self._store = store
        self._sampler = sampler
        self._rows = rows
        self._picked: list[tuple[HeldSequence, int, tuple[int, ...]]] = []
        self._drawn: list[tuple[HeldSequence, int, tuple[int, ...]]] = []

    def ask(self, piece: ScheduledSequence, samples: Sequence[HeldSequence], last: int) -> None:
        """Ask for the rows of those who draw behind token `last` of the call, the piece's last known one."""
        mode, drafts = samples[0].mode, piece.draft_token_ids
        place = self._rows.add_one(mode, last)
        for guess in range(len(drafts)):
            self._rows.add_one(mode, last + 1 + guess)
        asked = self._picked if mode is RowMode.GREEDY else self._drawn
        for held in samples:
            asked.append((held, place, drafts))

    def take(self, output: StepOutput, result: StepResult) -> None:
        """Choose, and let the sequences know their tokens."""
        if self._picked:
            assert output.greedy_ids is not None
            self._take_picked(output.greedy_ids.tolist(), result)
        if self._drawn:
            assert output.logits is not None
            self._take_drawn(output.logits, result)

    def _take_picked(self, best: list[int], result: StepResult) -> None:
        """Tokens that the program chose itself; a guess is right while it is the best of the row before."""
        taken = result.token_ids
        for held, place, drafts in self._picked:
            if best[place] < 0:
                result.fail(held.seq_id, NOT_NUMBERS)
            elif not drafts:
                taken[held.seq_id] = [best[place]]
            else:
                num_right = 0
                while num_right < len(drafts) and best[place + num_right] == drafts[num_right]:
                    num_right += 1
                # A row that holds NaN is looked at again when its token is known, and fails the sequence then.
                found = best[place : place + num_right + 1]
                taken[held.seq_id] = found if found[-1] >= 0 else found[:-1]
        self._store.append_new({held.seq_id: taken[held.seq_id] for held, _, _ in self._picked if held.seq_id in taken})

    def _take_drawn(self, logits: torch.Tensor, result: StepResult) -> None:
        """Draw from the first rows; where a token is the guess, from the row behind it, and so on."""
        drawing = []
        for held, place, drafts in self._drawn:
            if held.fault is None:
                num_output = self._store.num_known(held.seq_id) - held.origin.num_prompt_tokens
                drawing.append(_Drawing(held, place, drafts, num_output))
            else:
                result.fail(held.seq_id, str(held.fault), held.fault.param)
        going, host = drawing, logits.numpy()
        for depth in range(len(max((one.drafts for one in drawing), key=len, default=())) + 1):
            draws = [
                Draw(
                    host[one.place + depth],
                    one.held.params,
                    one.held.origin.sample_index,
                    one.num_output + depth,
                    one.held.processor,
                    one.place + depth,
                )
                for one in going
            ]
            tokens = self._sampler.sample(draws, logits)
            going = [
                one
                for one, draw, token_id in zip(going, draws, tokens, strict=True)
                if self._keep(one, draw, token_id, result) and one.token_ids[-1:] == list(one.drafts[depth : depth + 1])
            ]
            if not going:
                break
        result.token_ids.update({one.held.seq_id: one.token_ids for one in drawing if one.token_ids})
        self._store.append_new({one.held.seq_id: one.token_ids for one in drawing if one.token_ids})

    def _keep(self, one: _Drawing, draw: Draw, token_id: int | RowError, result: StepResult) -> bool:
        """Take a token in; False if there is none. Behind a guess that costs nothing: its row comes again."""
        held, num_top = one.held, one.held.params.logprobs
        try:
            if isinstance(token_id, RowError):
                raise token_id
            logprobs = None if num_top is None else from_logits(draw.logits, token_id, num_top)
        except (RowError, ValueError) as error:
            if not one.token_ids:
                result.fail(held.seq_id, str(error), getattr(error, "param", None))
            return False
        if logprobs is not None:
            result.logprobs.setdefault(held.seq_id, []).append(logprobs)
        one.token_ids.append(token_id)
        if held.processor is not None:
            held.processor.append(token_id)
        return True
