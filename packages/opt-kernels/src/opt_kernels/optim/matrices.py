"""What the optimizers of matrices share: which parameters are matrices, and who moves the others."""

from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from opt_kernels.dtensor import is_dtensor, local
from opt_kernels.formulas.registry import FORMULAS
from opt_kernels.hooks import GivenHooks
from opt_kernels.matrices.stacks import MatrixError, check
from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.optim.modules import groups_of, warn_of_suspects
from opt_kernels.optim.params import for_dtype
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.elementwise import elementwise
from opt_kernels.works import MatrixSpec, Work


class MatrixOptimizer(RuleOptimizer, ABC):
    """A `RuleOptimizer` whose rule moves matrices, and which gives the other parameters to an elementwise rule.

    A parameter is a matrix if it has two dims, unless its group says otherwise with `use_matrix_rule`: False for
    embeddings and output layers, True for 3-d parameters that are stacks of matrices. A group's `split_rows` are the
    rows of q, k and v in one query group of its fused parameters, to be orthogonalised one by one.

    Parameters alone do not tell which of them are embeddings or output layers. Given the model itself, an `nn.Module`
    in place of `params`, the optimizer leaves these to the elementwise rule (`opt_kernels.optim.modules.groups_of`).
    Given `named_parameters()`, it warns of names that look like theirs.

    `scalar_options` are those of the elementwise rule, `opt_kernels.rules.adam.Adam` or `lion.Lion`: `exp_avg_dtype`,
    `stochastic_rounding` and so on. Its backend is that of the matrices unless given there.

    `hooks` are of both rules, or by their names: `{"muon": [...], "adam": [...]}`.
    """

    def __init__(
        self,
        params: Params | nn.Module,
        rule: Rule,
        defaults: ParamGroup,
        *,
        scalar_optimizer: str | None,
        scalar_options: Mapping[str, Any] | None = None,
        mains: str,
        max_norm: float | None,
        backend: str | None,
        hooks: GivenHooks = (),
    ) -> None:
        self.scalar_rule = _scalar_rule(scalar_optimizer, scalar_options or {}, backend)
        of_groups: ParamGroup = {"use_matrix_rule": None, "split_rows": ()}
        given = groups_of(params) if isinstance(params, nn.Module) else params
        super().__init__(given, rule, defaults | of_groups, mains=mains, max_norm=max_norm, hooks=hooks)
        warn_of_suspects(self.param_groups)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (self.rule,) if self.scalar_rule is None else (self.rule, self.scalar_rule)

    def rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        chosen = group["use_matrix_rule"]
        if param.dim() == 2 if chosen is None else chosen:
            return for_dtype(self.rule, param)
        if self.scalar_rule is None:
            raise MatrixError(
                f"a parameter of shape {tuple(param.shape)} is not a matrix for {type(self).__name__}; give "
                "scalar_optimizer='adam' or 'lion', or leave it to another optimizer"
            )
        return for_dtype(self.scalar_rule, param)

    def matrix_of(self, group: ParamGroup, param: Tensor) -> MatrixSpec:
        if self.rule_of(group, param).needs is not Needs.MATRICES:
            return MatrixSpec()
        if is_dtensor(param) and local(param).shape != param.shape:
            raise MatrixError(
                f"{type(self).__name__} needs whole matrices, but of one of shape {tuple(param.shape)} this rank has "
                f"{tuple(local(param).shape)}; replicate it, or use opt_distributed, which gathers"
            )
        return MatrixSpec(split_rows=tuple(group["split_rows"]))

    def _check_param(self, group: ParamGroup, param: Tensor) -> None:
        super()._check_param(group, param)
        if is_lazy(param) or self.rule_of(group, param).needs is not Needs.MATRICES:
            return
        like = local(param).detach().to("meta")
        check(Work(grad=like, main=like, state={}, matrix=self.matrix_of(group, param)))
        self.rule.init_state(like)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"scalar_rule": self.scalar_rule}


def _scalar_rule(name: str | None, options: Mapping[str, Any], backend: str | None) -> Rule | None:
    match name:
        case None:
            if options:
                raise ValueError(f"scalar_options={options!r} without scalar_optimizer; give 'adam' or 'lion'")
            return None
        case "adam" | "lion":
            return elementwise(FORMULAS[name], **{"backend": backend, **options})
        case _:
            raise ValueError(f"scalar_optimizer={name!r} is unknown; give 'adam', 'lion', or None for matrices only")
