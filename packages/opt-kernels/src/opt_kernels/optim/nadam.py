"""Drop-in NAdam: adds the state `mu_product` of torch.optim.NAdam to state_dicts."""

from typing import Any

import torch

from opt_kernels.formulas.functions import power, q_pochhammer
from opt_kernels.optim.formula_optimizer import FormulaOptimizer
from opt_kernels.optim.state import STEP

MU_PRODUCT = "mu_product"


class NAdamOptimizer(FormulaOptimizer):
    """NAdam. It computes the product of mu(1) to mu(t) from t; torch.optim.NAdam needs it in its state."""

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form, with `mu_product` (0-d, float32) of every parameter that has state."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            q = 0.96 ** group["momentum_decay"]
            for state in (packed["state"][index] for index in group["params"] if index in packed["state"]):
                step = float(state[STEP])
                product = power(float(group["betas"][0]), step) * q_pochhammer(0.5 * q, q, step)
                state[MU_PRODUCT] = torch.tensor(float(product), dtype=torch.float32)
        return packed
