"""Expert biases of mixture-of-experts routers, which follow token counts instead of gradients.

Load balancing without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664) adds a bias to each expert's score when
experts are chosen. Such a router is a module with two tensors of shape (num_experts,): `expert_bias`, floating point
and not trained, and `local_tokens_per_expert`, to which its forward adds this rank's token counts.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.joined import sum_together_


@torch.no_grad()
def update_router_biases_(modules: Iterable[nn.Module], *, rate: float, comms: Sequence[Comm]) -> None:
    """Update the `expert_bias` of every router among `modules` and their submodules; reset `local_tokens_per_expert`.

    bias += rate * sign(mean(tokens) - tokens): up where an expert had fewer tokens than the mean, down where it had
    more. Tokens are summed over `comms`: all ranks that route with the same bias, which are the data-, context- and
    tensor-parallel ones. All of them call this function, so that their biases stay equal.

    Raises:
        ValueError: `rate` is below 0.
    """
    if rate < 0:
        raise ValueError(f"router_bias_update_rate={rate}; pass a rate above 0, or 0 to leave biases unchanged")
    routers = list(_routers(modules))
    for comm in comms:
        sum_together_([tokens for _, tokens in routers], comm)
    for bias, tokens in routers:
        counts = tokens.to(torch.float32)
        bias.add_(torch.sign(counts.mean() - counts), alpha=rate)
        tokens.zero_()


def _routers(modules: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Biases and token counts of all routers. Routers whose bias is None are skipped."""
    for module in modules:
        for inner in module.modules():
            bias, tokens = getattr(inner, "expert_bias", None), getattr(inner, "local_tokens_per_expert", None)
            if isinstance(bias, Tensor) and isinstance(tokens, Tensor):
                yield bias, tokens
