"""AdamW with 8-bit moments: its bytes, and its loss compared with that of bitsandbytes if it is installed."""

from importlib.util import find_spec

import torch
from torch import nn

from opt_kernels import AdamW


def train(make_optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = make_optimizer(model.parameters())
    for _ in range(50):
        x = torch.randn(32, 64)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), optimizer, sum(p.numel() for p in model.parameters())


loss, optimizer, num_params = train(
    lambda params: AdamW(params, lr=1e-3, exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8)
)
tensors = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
print(f"bytes of state per parameter: {sum(t.numel() * t.itemsize for t in tensors) / num_params:.2f}")
print(f"loss with 8-bit moments: {loss:.4f}")
print(f"loss with float32 moments: {train(lambda params: torch.optim.AdamW(params, lr=1e-3))[0]:.4f}")
if find_spec("bitsandbytes"):
    import bitsandbytes

    print(f"loss with bitsandbytes: {train(lambda params: bitsandbytes.optim.AdamW8bit(params, lr=1e-3))[0]:.4f}")
