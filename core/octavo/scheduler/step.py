"""The step that is being put together."""

from octavo.scheduler.messages import ScheduledSequence
from octavo.scheduler.request import Request, Sequence

__all__ = ["Share", "Step"]


class Share:
    """One sequence's part of a step.

    Attributes:
        request, seq: whose it is.
        num_tokens: known tokens that it computes.
        samples: who draws a token behind them: the sequence itself, with its forks at the end of a prompt of n > 1;
            nobody while more known tokens remain.
        draft_token_ids: guesses of what comes next, computed behind the known tokens.
        new_blocks: appended to the block table.
        replaced_blocks: (index in the table, new block), copy-on-write.

    """

    __slots__ = ("draft_token_ids", "new_blocks", "num_tokens", "replaced_blocks", "request", "samples", "seq")

    def __init__(self, request: Request, seq: Sequence, num_tokens: int) -> None:
        self.request = request
        self.seq = seq
        self.num_tokens = num_tokens
        self.samples: tuple[Sequence, ...] = ()
        self.draft_token_ids: tuple[int, ...] = ()
        self.new_blocks: tuple[int, ...] = ()
        self.replaced_blocks: tuple[tuple[int, int], ...] = ()

    def message(self, is_new: bool) -> ScheduledSequence:
        """What the executor is told; of a sequence that is new to it, the blocks are told elsewhere."""
        seq, samples = self.seq, self.samples
        return ScheduledSequence(
            seq.seq_id,
            seq.num_computed,
            self.num_tokens,
            () if is_new else self.new_blocks,
            () if is_new else self.replaced_blocks,
            (seq.seq_id,) if len(samples) == 1 else tuple([s.seq_id for s in samples]),
            self.draft_token_ids,
        )


class Step:
    """What a step has so far.

    Attributes:
        budget: tokens that it may still take.
        shares: of the sequences that compute, in the order of the batch's rows.
        new: sequences that the executor has not got, by id; some compute nothing in this step (forks).
        removed: sequences that it is told to forget.
        swapped_out, swapped_in: requests whose blocks move.
        computing: chain hashes of the full blocks that the step completes.

    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: list[Share] = []
        self.new: dict[int, tuple[Request, Sequence]] = {}
        self.removed: tuple[int, ...] = ()
        self.swapped_out: list[Request] = []
        self.swapped_in: list[Request] = []
        self.computing: set[bytes] = set()

    @property
    def requests(self) -> list[Request]:
        """Those that compute, each once."""
        return list({share.request.request_id: share.request for share in self.shares}.values())
