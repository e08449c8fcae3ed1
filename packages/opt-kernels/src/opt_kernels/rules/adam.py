"""Adam and AdamW."""

from typing import Any

from opt_kernels.formulas.adam import ADAM
from opt_kernels.rules.elementwise import ElementwiseRule, elementwise


def Adam(*, decoupled: bool = True, **options: Any) -> ElementwiseRule:
    """Adam (Kingma & Ba 2015), with decoupled weight decay (AdamW, Loshchilov & Hutter 2019) by default.

    `decoupled=False` adds weight decay to the gradient (L2); `order` is that of the operations: "torch" for
    torch.optim.AdamW's, "te" for Transformer Engine's; `amsgrad`; `exp_avg_dtype`, `exp_avg_sq_dtype` and the options
    of every rule, see `opt_kernels.rules.elementwise.elementwise`, which also says what is raised. The formula is in
    `formulas/adam.py`.
    """
    return elementwise(ADAM, decoupled_weight_decay=decoupled, **options)
