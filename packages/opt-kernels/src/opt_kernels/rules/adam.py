"""Adam and AdamW."""

from typing import Any

from opt_kernels.formulas.adam import ADAM
from opt_kernels.rules.elementwise import ElementwiseRule, elementwise


def Adam(*, decoupled: bool = True, **options: Any) -> ElementwiseRule:
    """Adam (Kingma & Ba 2015), with decoupled weight decay (AdamW, Loshchilov & Hutter 2019) by default.

    Options: `decoupled=False` adds weight decay to the gradient (L2). `order` is the order of operations: "torch" for
    that of torch.optim.AdamW, "te" for that of Transformer Engine. `amsgrad`, `exp_avg_dtype`, `exp_avg_sq_dtype`, and
    the options and errors of `opt_kernels.rules.elementwise.elementwise`. The formula is in `formulas/adam.py`.
    """
    return elementwise(ADAM, decoupled_weight_decay=decoupled, **options)
