"""`MatrixOptimizer`: base class of the drop-in optimizers of matrix rules, with an elementwise rule for the rest."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from itertools import repeat
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from opt_kernels.dtensor import is_dtensor, local
from opt_kernels.formulas.registry import FORMULAS
from opt_kernels.hooks import GivenHooks, bare
from opt_kernels.matrices.access import MatrixError, check, check_shape
from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.optim.checked import for_dtype
from opt_kernels.optim.groups import Options, ParamGroup, bound_arguments, params_with_groups
from opt_kernels.optim.param_rows import params_of
from opt_kernels.params import frozen
from opt_kernels.rules.base import Needs, Rule, build_rule, init_state, keeps_parts
from opt_kernels.rules.eigenbases import EigenbasisRule
from opt_kernels.rules.elementwise import elementwise
from opt_kernels.works import MatrixSpec, NamedChoice, Number, Work

_SUSPECTS = frozenset(
    {"lm_head", "output_layer", "head", "unembed", "embed_out", "embed", "embedding", "embeddings", "embed_tokens"}
    | {"tok_embeddings", "word_embeddings", "position_embeddings", "pos_embed", "wte", "wpe"}
)
_STACKED_VECTOR = re.compile(
    r"(?:^|[._])bias(?:es)?\d*(?:_[^.]*)?(?:\.\d+)*$"  # experts.down_proj_bias, dt_bias, biases.0
    r"|(?:^|\.)A(?:_[a-z]+)?_logs?$"  # of Mamba and its kin
    r"|(?:norm(?:_?\d+|_[a-z])?|(?:^|\.)ln(?:_\w+)?)\.(?:weight|scale|gamma)$",  # norms of each head
    re.IGNORECASE,
)
_OF_MAMBA = re.compile(r"(?:^|\.)(?:A(?:_[a-z]+)?_logs?|dt_bias)$", re.IGNORECASE)


def is_undecayed(param: Tensor, name: str) -> bool:
    """Return whether a parameter has no weight decay and no matrix rule: its authors marked it `_no_weight_decay`, or
    by name it is a stack of vectors in two or more dims, as biases of experts are, or Mamba's `A_log` or `dt_bias`.

    `_no_weight_decay = False` overrides the name. `opt_paramgroups.get_standard_config_overrides` knows the same names.
    """
    marked = getattr(param, "_no_weight_decay", None)
    if marked is not None:
        return bool(marked)
    pattern = _STACKED_VECTOR if param.dim() >= 2 else _OF_MAMBA
    return bool(pattern.search(name))


def groups_of(module: nn.Module) -> list[ParamGroup]:
    """All parameters of `module` in at most three groups: hidden matrices, the rest with `use_matrix_rule=False`, and
    those that `is_undecayed` finds, also with `weight_decay=0.0`.

    Embeddings are the parameters of `nn.Embedding` and `nn.EmbeddingBag`. An output layer is tied to an embedding, or
    is the last `nn.Linear` if its weight has the shape of an embedding. The attribute
    `is_embedding_or_output_parameter` of a parameter overrides this.
    """
    undecayed = {param: name for name, param in module.named_parameters() if is_undecayed(param, name)}
    matrices, rest = former_groups_of(module)
    groups: list[ParamGroup] = [
        {"params": [param for param in matrices if param not in undecayed]},
        {"params": [param for param in rest if param not in undecayed], "use_matrix_rule": False},
        {"params": list(undecayed), "use_matrix_rule": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def former_groups_of(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of `module` that are neither embeddings nor output layers, and all other parameters: the groups of
    releases that did not know `is_undecayed`, in whose order their states were saved."""
    recognised: set[Tensor] = set()  # of embeddings and the output layer
    shapes = []
    last_linear = None
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            recognised.update(layer.parameters())
            shapes.append(layer.weight.shape)
        if isinstance(layer, nn.Linear):
            last_linear = layer
    if last_linear is not None and last_linear.weight.shape in shapes:
        recognised.add(last_linear.weight)
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for param in module.parameters():
        is_excluded = getattr(param, "is_embedding_or_output_parameter", None)
        if is_excluded is None:
            is_excluded = param in recognised
        if param.dim() == 2 and not is_excluded:
            matrices.append(param)
        else:
            rest.append(param)
    return matrices, rest


def warn_of_suspects(groups: Iterable[ParamGroup]) -> None:
    """Warn of matrices named like embeddings or output layers, and of vectors with weight decay that their names or
    marks deny, in groups without `use_matrix_rule`."""
    suspects: list[str] = []
    decayed: list[str] = []
    for group in groups:
        if group["use_matrix_rule"] is not None:
            continue
        is_decayed = float(group.get("weight_decay", 0.0)) != 0
        names = group.get("param_names") or repeat("")
        for name, param in zip(names, group["params"], strict=False):
            _, _, layer = name.removesuffix(".weight").rpartition(".")
            if is_undecayed(param, name):
                if is_decayed:
                    decayed.append(repr(name) if name else f"a parameter of shape {tuple(param.shape)}")
            elif param.dim() == 2 and layer in _SUSPECTS:
                suspects.append(repr(name))
    if suspects:
        warnings.warn(
            f"{', '.join(suspects)}: updated as hidden matrices, but named like embeddings or output "
            "layers; pass the model itself in place of its parameters, or set use_matrix_rule in their group: False, "
            "or True to confirm",
            stacklevel=4,
        )
    if decayed:
        warnings.warn(
            f"{', '.join(decayed)}: weight decay of a bias or of another parameter that by its name or mark has none; "
            "pass the model itself in place of its parameters, or set weight_decay=0.0 and use_matrix_rule=False in a "
            "group of their own",
            stacklevel=4,
        )


class MatrixOptimizer(RuleOptimizer):
    """A `RuleOptimizer` with a matrix rule for matrices and an elementwise rule for all other parameters.

    A parameter is a matrix if it has two dims, unless its group sets `use_matrix_rule`: False for embeddings and output
    layers, True for 3-d parameters that are stacks of matrices. A group may declare that its parameters consist of
    several matrices, by one of: `split_rows`, the rows of q, k and v in one query group of fused parameters, or any
    rows that the matrices have in turn, such as (1, 1) for a gate and an up projection cut row by row;
    `num_heads`, equal parts of all rows, as in per-head orthogonalisation (GLM-5, arXiv 2602.15763); `split_sizes`,
    parts of any sizes that add up to all rows.

    Embeddings and output layers cannot be recognised from parameters alone. If `params` is the model itself, an
    `nn.Module`, the elementwise rule updates them (`groups_of`). If `params` is
    `named_parameters()`, names that look like theirs raise a warning.

    The elementwise rule also updates 2-D parameters that are no matrices by their name, such as biases of experts and
    Mamba's `A_log`, or by the mark `_no_weight_decay` of their authors. Given the model, they have no weight decay;
    otherwise that of their group, with a warning.

    `scalar_options` are options of the elementwise rule, `opt_kernels.rules.Adam` or `Lion`: `exp_avg_dtype`,
    `stochastic_rounding` and so on. Its backend defaults to that of the matrix rule.

    `hooks` apply to both rules, or are given by the names of the rules: `{"muon": [...], "adam": [...]}`.

    A final class declares its `numbers` and `options`, from which its signature follows, and its `rule_class`, or
    returns the rule for given ones. `drop_in` generates it from the class of a rule. All numbers may be given by
    position; `mains`, `max_norm` and `backend` are as in `AdamW`.
    """

    numbers: ClassVar[Options]  # hyper-parameters, which may differ between groups
    options: ClassVar[Options]  # options of the rule, equal in all groups
    rule_class: ClassVar[type[Rule]]  # a dataclass
    default_hooks: ClassVar[GivenHooks] = ()
    structural = ("use_matrix_rule", "split_rows", "num_heads", "split_sizes")
    __signature__: ClassVar[Signature]
    _former: tuple[list[Tensor], ...] = ()  # `former_groups_of` the model, if it was given

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "numbers" in vars(cls) and "declared" not in vars(cls):
            betas = cls.numbers.get("betas")
            others = tuple(number for number in cls.declared if number.name != "betas")
            cls.declared = others if betas is None else (*others, Number("betas", betas))
        cls.__signature__ = _signature(cls.numbers, {**cls.options, **_OF_ALL, "hooks": cls.default_hooks})

    def __init__(self, params: Params | nn.Module, *args: Any, **options: Any) -> None:
        given = bound_arguments(type(self), params, *args, **options)
        numbers = {name: given[name] for name in self.numbers}
        self._check_numbers(numbers)
        rule = self.rule_with(numbers | {name: given[name] for name in (*self.options, "backend")})
        self.scalar_rule = _scalar_rule(given["scalar_optimizer"], given["scalar_options"] or {}, given["backend"])
        self._names: dict[Tensor, str] = {}
        of_groups: ParamGroup = {"use_matrix_rule": None, **_UNSPLIT}
        if isinstance(params, nn.Module):
            self._names = {param: name for name, param in params.named_parameters()}
            self._former = former_groups_of(params)
            params = groups_of(params)
        super().__init__(
            params,
            rule,
            numbers | of_groups,
            mains=given["mains"],
            max_norm=given["max_norm"],
            hooks=given["hooks"],
            flags={"capturable": given["capturable"]},
        )
        warn_of_suspects(self.param_groups)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (self.rule,) if self.scalar_rule is None else (self.rule, self.scalar_rule)

    @classmethod
    def rule_with(cls, given: Options) -> Rule:
        """Return the rule for these numbers and options, given by their names as arguments."""
        options = {name: given[name] for name in cls.options}
        if "backend" in {field.name for field in fields(cast(Any, cls.rule_class))}:
            options["backend"] = given["backend"]
        return build_rule(cls.rule_class, options)

    def rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        is_matrix = group["use_matrix_rule"]
        if is_matrix is None:
            is_matrix = param.dim() == 2 and not is_undecayed(param, self._name_of(group, param))
        if is_matrix:
            return for_dtype(self.rule, param)
        if self.scalar_rule is None:
            raise MatrixError(
                f"{self._named(group, param)} is not a matrix for {type(self).__name__}; set "
                "scalar_optimizer='adam' or 'lion', or leave it to another optimizer"
            )
        return for_dtype(self.scalar_rule, param)

    def matrix_of(self, group: ParamGroup, param: Tensor) -> MatrixSpec:
        if self.rule_of(group, param).needs is not Needs.MATRICES:
            return MatrixSpec()
        if is_dtensor(param) and local(param).shape != param.shape:
            raise MatrixError(
                f"{type(self).__name__} needs whole matrices, but this rank has only {tuple(local(param).shape)} of "
                f"{self._named(group, param)}; replicate it, or use opt_stack.get_optimizer, which gathers matrices"
            )
        check_shape(param.shape)
        chosen = {name: frozen(group[name]) for name in _UNSPLIT}
        given = {name: value for name, value in chosen.items() if value != _UNSPLIT[name]}
        if len(given) > 1:
            options = " and ".join(f"{name}={value!r}" for name, value in given.items())
            raise MatrixError(f"a group with {options}: set only one of them")
        try:
            return _split_of(given, rows=param.shape[-2])
        except MatrixError as error:
            raise MatrixError(f"{error} of {self._named(group, param)}") from None

    def _name_of(self, group: ParamGroup, param: Tensor) -> str:
        if param not in self._names and {"params", "param_names"} <= group.keys():
            self._names.update(zip(group["params"], group["param_names"], strict=True))
        return self._names.get(param, "")

    def _check_grads(self) -> None:
        """Raise MatrixError for a gradient that is not finite, which SOAP's factors refuse after other writes."""
        if not isinstance(bare(self.rule), EigenbasisRule):
            return
        params = []
        flags = []
        for group, param in params_with_groups(self.param_groups):
            grad = param.grad
            if grad is None or grad.layout is not torch.strided:  # sparse ones are refused later
                continue
            if self.rule_of(group, param).needs is Needs.MATRICES:
                params.append((group, param))
                flags.append(local(grad).isfinite().all())
        are_finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        for (group, param), is_finite in zip(params, are_finite):
            if not is_finite:
                raise MatrixError(f"the gradient of {self._named(group, param)} is not finite; nothing was written")

    def _in_present_groups(self, saved: Sequence[ParamGroup]) -> Sequence[ParamGroup]:
        """Saved groups of a release that did not know `is_undecayed`, in the groups of this optimizer."""
        former = [params for params in self._former if params]
        present = [group["params"] for group in self.param_groups]
        sizes = [len(group["params"]) for group in saved]
        arranged = []
        if sizes == [len(params) for params in present]:
            for group, then in zip(self.param_groups, saved, strict=True):
                # The states of single parameters were put into these groups, with entries of the former ones.
                is_former = then.get("use_matrix_rule") is not False
                arranged.append(self._spared(group, then) if is_former else then)
            return arranged
        is_former = sizes == [len(params) for params in former]
        if not is_former or sum(map(len, present)) != sum(sizes):
            return saved
        index: dict[Tensor, Any] = {}
        source: dict[Tensor, ParamGroup] = {}
        for params, group in zip(former, saved, strict=True):
            index.update(zip(params, group["params"], strict=True))
            source.update(dict.fromkeys(params, group))
        for group in self.param_groups:
            then = self._spared(group, source[group["params"][0]])
            arranged.append({**then, "params": [index[param] for param in group["params"]]})
        return arranged

    def _spared(self, group: ParamGroup, saved: ParamGroup) -> ParamGroup:
        """`saved`, with the rule and the weight decay of `group` if that is the group that `is_undecayed` made."""
        first = next(iter(group["params"]), None)
        if not self._former or first is None or not is_undecayed(first, self._name_of(group, first)):
            return saved
        return {**saved, "use_matrix_rule": group["use_matrix_rule"], "weight_decay": group["weight_decay"]}

    def _restarts(self, group: ParamGroup, param: Tensor, values: Mapping[str, Any]) -> bool:
        """Whether `values` are of the matrix rule, which updated `param` before `is_undecayed` was known."""
        rule = self.rule_of(group, param)
        if rule.needs is Needs.MATRICES or not is_undecayed(param, self._name_of(group, param)):
            return False
        of_matrices = {spec.name for spec in self.rule.state_specs} - {spec.name for spec in rule.state_specs}
        return not of_matrices.isdisjoint(values)

    def _check_param(self, group: ParamGroup, param: Tensor) -> None:
        super()._check_param(group, param)
        if is_lazy(param) or self.rule_of(group, param).needs is not Needs.MATRICES:
            return
        like = local(param).detach().to("meta")
        check(Work(grad=like, main=like, state={}, matrix=self.matrix_of(group, param)))
        init_state(self.rule, like, self.matrix_of(group, param), of=self._named(group, param))

    def _check_changed(self, group: ParamGroup, before: ParamGroup) -> None:
        for param in filter(self.state.get, group["params"]):
            rule = self.rule_of(before, param)
            if self.rule_of(group, param) != rule:
                raise MatrixError(
                    f"use_matrix_rule={group['use_matrix_rule']!r} was set after the first step of "
                    f"{self._named(group, param)}, whose state is that of rule {rule.name!r}; set it before"
                )
            self._check_split(param, group, before)

    def _check_loaded(self, own: ParamGroup, loaded: ParamGroup) -> None:
        for param in own["params"]:
            self._check_split(param, own, loaded)

    def _check_split(self, param: Tensor, group: ParamGroup, before: ParamGroup) -> None:
        """Raise MatrixError if the state of `param` belongs to other parts of its rows."""
        if keeps_parts(self.rule) and self.matrix_of(group, param) != self.matrix_of(before, param):
            then = {name: before[name] for name in _UNSPLIT}
            now = {name: group[name] for name in _UNSPLIT}
            raise MatrixError(
                f"state of {self._named(group, param)} that was made with {then}, but here the group has {now}: "
                f"{type(self).__name__} keeps factors and moments of the matrices that rows are split into; set the "
                "former options again, or train on without this state"
            )

    def __getstate__(self) -> dict[str, Any]:
        params: list[Any] = params_of(self.param_groups)
        marks = {param: param._no_weight_decay for param in params if hasattr(param, "_no_weight_decay")}
        return super().__getstate__() | {
            "scalar_rule": self.scalar_rule,
            "_names": self._names,
            "_former": self._former,
            "_marks": marks,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of a copy, whose parameters have lost the marks that `is_undecayed` reads."""
        for param, mark in state.pop("_marks", {}).items():
            param._no_weight_decay = mark
        super().__setstate__(state)


_UNSPLIT: Options = {"split_rows": (), "num_heads": 1, "split_sizes": ()}
_OF_ALL: Options = {
    "scalar_optimizer": None,
    "scalar_options": None,
    "mains": "param",
    "max_norm": None,
    "backend": None,
    "capturable": False,
}


def options_of(rule: type, *names: str) -> dict[str, Any]:
    """The defaults of all fields of a rule except `backend`, or of those in `names`, with the values of enums."""
    defaults: dict[str, Any] = {}
    for field in fields(rule):
        if field.name not in names if names else not field.init or field.name == "backend":
            continue
        value = field.default if field.default_factory is MISSING else field.default_factory()
        if value is MISSING:
            raise ValueError(f"field {field.name!r} of {rule.__name__} has no default; give it one")
        defaults[field.name] = value.value if isinstance(value, NamedChoice) else value
    return defaults


def _signature(numbers: Options, options: Options) -> Signature:
    positional = [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD)]
    positional += [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in numbers.items()]
    by_name = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in options.items()]
    return Signature([*positional, *by_name])


def _split_of(given: Options, *, rows: int) -> MatrixSpec:
    """How the rows are split into matrices. Raises MatrixError if heads or sizes do not fit the number of rows."""
    match given:
        case {"num_heads": heads}:
            if not isinstance(heads, int) or heads < 1 or rows % heads:
                raise MatrixError(f"num_heads={heads!r} does not divide the {rows} rows")
            return MatrixSpec(split_rows=(rows // heads,), by_group=True)
        case {"split_sizes": sizes}:
            if sum(sizes) != rows or min(sizes) < 1:
                raise MatrixError(f"split_sizes={tuple(sizes)} are not positive numbers that make up the {rows} rows")
            return MatrixSpec(split_rows=tuple(sizes))
    return MatrixSpec(split_rows=tuple(given.get("split_rows", ())))


def _scalar_rule(name: str | None, options: Options, backend: str | None) -> Rule | None:
    match name:
        case None:
            if options:
                raise ValueError(f"scalar_options={options!r} without scalar_optimizer; set 'adam' or 'lion'")
            return None
        case "adam" | "lion" if options.get("maximize"):
            raise ValueError(f"scalar_options={options!r}: matrices are always minimized; leave maximize out")
        case "adam" | "lion":
            return elementwise(FORMULAS[name], **{"backend": backend, **options})
        case _:
            raise ValueError(f"scalar_optimizer={name!r} is unknown; pass 'adam', 'lion', or None for matrices only")
