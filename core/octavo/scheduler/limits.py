"""What can ever be served: refused at admission, not discovered when nothing else is left to preempt."""

from dataclasses import dataclass

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """The sizes that bound one request.

    Attributes:
        max_model_len: tokens of prompt and output together.
        max_num_seqs: samples that run at once.
        num_blocks: KV blocks on the device.
        block_size: tokens a block.

    """

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int

    def max_output_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """How many tokens each sample may generate: max_tokens, or what length and blocks leave.

        Raises:
            RequestError: the request could never be served: what was asked, what fits, which settings change it.

        """
        if not num_prompt:
            raise RequestError("the prompt has no tokens; at least one is needed", "prompt")
        if params.n > self.max_num_seqs:
            raise RequestError(
                f"n is {params.n}, at most {self.max_num_seqs} samples run at once; lower n, or raise max_num_seqs and "
                "max_num_batched_tokens",
                "n",
            )
        room = self.max_model_len - num_prompt
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise RequestError(
                f"the prompt has {num_prompt} tokens and max_model_len is {self.max_model_len}, one of them for "
                "output; shorten the prompt or raise max_model_len",
                "prompt",
            )
        longest = self._longest(num_prompt, params.n)
        if params.max_tokens is None:
            wanted, least = room, min(1, room)
        else:
            wanted = least = min(params.max_tokens, room)
        if num_prompt + least > longest:
            raise RequestError(
                f"{num_prompt} prompt tokens and {least} of output for n = {params.n} can never fit in "
                f"the KV cache: at most {longest} tokens in all; lower max_tokens, or raise num_blocks_override or "
                "memory_utilization",
                "max_tokens",
            )
        return min(longest - num_prompt, wanted)

    def _longest(self, num_prompt: int, n: int) -> int:
        """Tokens that each of n samples may reach when they share their prompt's full blocks and nothing else."""
        if n == 1:
            return min(self.max_model_len, self.num_blocks * self.block_size)
        shared = num_prompt // self.block_size
        own = max(self.num_blocks - shared - 1, 0) // n  # one block is the source of their copies
        return min(self.max_model_len, (shared + own) * self.block_size)
