"""A mixture of experts in plain torch: the router in float32, then each expert on the tokens that chose it."""

import torch
import torch.nn.functional as F

from octavo.contract import Moe, Support
from octavo.contract.reference import by_element
from octavo.model.blocks import Blocks

__all__ = ["MoeBlock", "route"]


def route(scores: torch.Tensor, moe: Moe, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and what their outputs are multiplied by.

    Args:
        scores: [T, num_experts] float32, the router's product.
        moe: how to choose.
        correction: [num_experts] float32, added for the choice only (DeepSeek-V3, section 2.1.2).

    Returns:
        ids [T, top_k] int64 and weights [T, top_k] float32.

    """
    shares = scores.softmax(-1) if moe.score == "softmax" else by_element(torch.sigmoid, scores)
    choice = shares if correction is None else shares + correction
    if moe.groups:
        by_group = choice.view(len(choice), moe.groups.num_groups, -1)
        worth = by_group.topk(moe.groups.top_per_group, -1).values.sum(-1)
        kept = worth.topk(moe.groups.num_kept, -1).indices
        dropped = torch.ones_like(worth, dtype=torch.bool).scatter(-1, kept, False)
        choice = by_group.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
    ids = choice.topk(moe.top_k, -1).indices
    weights = shares.gather(-1, ids)
    if moe.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * moe.scale


class MoeBlock:
    """x [T, H] -> [T, H]."""

    def __init__(self, blocks: Blocks, at: str, moe: Moe) -> None:
        """Take the slots `at`.moe.* and `at`.shared.*."""
        blocks.limit("mixture of experts", Support.no("torch's matrix product over as many rows as chose an expert"))
        self._moe = moe
        self._router = blocks.tensor(f"{at}.moe.router")
        self._router_bias = blocks.bias(f"{at}.moe.router")
        corrected = f"{at}.moe.correction" in blocks.weights
        self._correction = blocks.tensor(f"{at}.moe.correction") if corrected else None
        self._up = blocks.experts(f"{at}.moe.up", moe.num_experts)
        self._down = blocks.experts(f"{at}.moe.down", moe.num_experts)
        self._activation = blocks.activation(moe.expert)
        self._shared = blocks.mlp(f"{at}.shared", moe.shared.mlp) if moe.shared else None
        self._shared_gate = blocks.linear(f"{at}.shared.gate") if moe.shared and moe.shared.gated else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = F.linear(x.float(), self._router, self._router_bias)
        ids, weights = route(scores, self._moe, self._correction)
        y = torch.zeros_like(x)
        chosen = ids.flatten()  # token by token
        order = chosen.argsort(stable=True)  # pairs of token and choice, by expert
        tokens, shares = order // ids.shape[1], weights.flatten()[order, None].to(x.dtype)
        start = 0
        for expert, num_pairs in enumerate(self._num_chosen(chosen)):
            if num_pairs:
                pairs = slice(start, start := start + num_pairs)
                y.index_add_(0, tokens[pairs], self._expert(expert, x[tokens[pairs]]) * shares[pairs])
        if self._shared is None:
            return y
        shared = self._shared(x)
        return y + (shared * by_element(torch.sigmoid, self._shared_gate(x)) if self._shared_gate else shared)

    def _num_chosen(self, chosen: torch.Tensor) -> list[int]:
        """How often each expert was chosen: the one thing of a layer that the host waits for."""
        experts = torch.arange(self._moe.num_experts, device=chosen.device)
        counts: list[int] = (chosen[:, None] == experts).sum(0).tolist()
        return counts

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return self._down(expert, self._activation(self._up(expert, x)))
