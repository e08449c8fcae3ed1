"""`OptimizerParamScheduler`: learning rate and weight decay of every parameter group, by Megatron-Core's rules."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .errors import ScheduleError, is_number, refuse, unknown_name
from .groups import VERSION, Entries, Group, GroupScheduler, Optimizers, check_state, set_
from .schedule import Plain, Schedule
from .settings import SETTINGS, Settings, WarmupFirst, bounds_of, group_values, refuse_foreign

logger = logging.getLogger("opt_scheduler")


# The fields that every state has, each with its keys in older checkpoints of Megatron-Core, oldest first.
_OLDER_KEYS = {
    "max_lr": ["start_lr"],
    "min_lr": [],
    "lr_warmup_steps": ["warmup_iter", "warmup_steps"],
    "lr_decay_steps": ["end_iter", "decay_steps"],
    "lr_decay_style": ["decay_style"],
    "num_steps": ["num_iters"],
}


class OptimizerParamScheduler(GroupScheduler):
    """Anneals the learning rate and ramps the weight decay of the groups of `optimizer`, or of a list of optimizers.

    Has the signature and the numbers of Megatron-Core's class. The learning rate rises from `init_lr` to `max_lr` over
    `lr_warmup_steps` and follows `lr_decay_style` ("constant", "linear", "cosine", "inverse-square-root" or "WSD") down
    to `min_lr` at `lr_decay_steps`, which counts from step 0 and contains the warmup. "WSD" stays at `max_lr` and falls
    over the last `wsd_decay_steps` along `lr_wsd_decay_style` ("linear", "cosine", "exponential" or "minus_sqrt").
    The weight decay goes from `start_wd` to `end_wd` over `wd_incr_steps` ("constant", "linear" or "cosine"). A group
    may have its own `max_lr`, `min_lr`, `start_wd`, `end_wd` and `wd_mult`; None there means not set.

    Steps are in the unit that `step(increment)` counts; Megatron-Core counts samples. The groups are written when the
    scheduler is built. A `weight_decay` already in a group is replaced; `wd_mult=0` keeps it at 0. Tensors in groups
    are filled in place. Every setting is an attribute; assigning one validates all of them, and takes effect at the
    next step.

    Differences from Megatron-Core: `min_lr=None` means 0. `warmup_first="one"` advances the warmup by one step, so that
    the first update does not use `init_lr`; if steps are samples, pass the batch size instead of "one".

    On load, `use_checkpoint_opt_param_scheduler` takes the saved settings, `override_opt_param_scheduler` keeps those
    given here that are not None, and with neither flag a difference is an error. `override_opt_param_scheduler` may
    also be a list of the fields to keep.

    >>> from types import SimpleNamespace
    >>> optimizer = SimpleNamespace(param_groups=[{"params": []}, {"params": [], "max_lr": 1e-4, "wd_mult": 0.0}])
    >>> scheduler = OptimizerParamScheduler(
    ...     optimizer, init_lr=0.0, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=10, lr_decay_steps=110,
    ...     lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=110, wd_incr_style="constant",
    ... )
    >>> scheduler.step(60)
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.0005, 0.1), (5e-05, 0.0)]
    >>> scheduler.lr_at(110)
    0.0

    Raises:
        ScheduleError: lists every invalid argument, with what is allowed.
    """

    def __init__(
        self,
        optimizer: Optimizers,
        init_lr: float,
        max_lr: float,
        min_lr: float | None,
        lr_warmup_steps: float,
        lr_decay_steps: float,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: float,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | Collection[str] | None = False,
        wsd_decay_steps: float | None = None,
        lr_wsd_decay_style: str | None = None,
        *,
        warmup_first: WarmupFirst = "init",
    ) -> None:
        # Each argument that has the name of a setting is that setting.
        given = {name: value for name, value in locals().items() if name in SETTINGS}
        super().__init__(optimizer)
        may_be_none = ("min_lr", "wsd_decay_steps", "lr_wsd_decay_style")
        self._not_given = frozenset(name for name in may_be_none if given[name] is None)
        self.settings = Settings(**given | {"min_lr": 0.0 if min_lr is None else min_lr})
        self.use_checkpoint_opt_param_scheduler = bool(use_checkpoint_opt_param_scheduler)
        self.override_opt_param_scheduler = _checked_override(
            override_opt_param_scheduler, use_checkpoint=self.use_checkpoint_opt_param_scheduler
        )
        self.step(0)
        for name in ("max_lr", "min_lr"):
            owns = [group.get(name) for group in self.param_groups]
            if name not in self._not_given and owns and None not in (*owns, given[name]) and given[name] not in owns:
                logger.warning(
                    "%s=%r has no effect: every parameter group has its own, as get_optimizer writes them from the "
                    "configuration (%r)", name, given[name], owns[0],
                )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS:  # every setting is an attribute too
            return getattr(self.settings, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name not in SETTINGS:
            return super().__setattr__(name, value)
        before = asdict(self.settings)
        self.settings = replace(self.settings, **{name: value})  # type: ignore[arg-type]
        self._not_given -= {name}
        for group in self.param_groups:
            group.update(_followed(group, [before], asdict(self.settings)))

    def get_lr(self, param_group: Entries | None = None) -> float:
        """Return the learning rate of `param_group` at the present step; None stands for a group without overrides."""
        return self.lr_at(self.num_steps, param_group)

    def get_wd(self, param_group: Entries | None = None) -> float:
        """Return the weight decay of `param_group` at the present step; None stands for a group without overrides."""
        return self.wd_at(self.num_steps, param_group)

    def lr_at(self, step: float, param_group: Entries | None = None) -> float:
        """Return the learning rate of `param_group` at any step, without advancing.

        Raises:
            ScheduleError: the group has invalid overrides.
        """
        return self._values_at(step, param_group)[0]

    def wd_at(self, step: float, param_group: Entries | None = None) -> float:
        """Return the weight decay of `param_group` at any step, without advancing.

        Raises:
            ScheduleError: the group has invalid overrides.
        """
        return self._values_at(step, param_group)[1]

    def _values_at(self, step: float, param_group: Entries | None) -> tuple[float, float]:
        return group_values(self.settings, [param_group or {}], max(step, 0))[0]

    def lr_schedule(self, param_group: Entries | None = None) -> Schedule:
        """Return the learning rate of `param_group` as a `Schedule`, to plot, compare or use elsewhere."""
        max_lr, min_lr, *_ = bounds_of(self.settings, param_group or {})
        return replace(self.settings, max_lr=max_lr, min_lr=min_lr)

    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        refuse_foreign(groups)
        self._write_values(groups, group_values(self.settings, groups, num_steps))

    def _write_values(self, groups: Sequence[Group], values: Sequence[tuple[float, float]]) -> None:
        filled: set[int] = set()
        for group, (lr, weight_decay) in zip(groups, values, strict=True):
            # The usual case of `set_`, inlined: a step spends its time in this loop.
            if type(group.get("lr")) is float and type(group.get("weight_decay")) is float:
                group["lr"] = lr
                group["weight_decay"] = weight_decay
            else:
                set_(group, "lr", lr, filled)
                set_(group, "weight_decay", weight_decay, filled)

    def _base_lr(self, place: int, group: Group) -> float:
        return bounds_of(self.settings, group).max_lr

    def state_dict(self) -> Plain:
        """Return the step count and every setting in plain types, with Megatron-Core's keys among them."""
        return {"version": VERSION, "num_steps": self.num_steps, **asdict(self.settings)}

    def _check_and_set(self, cls_value: Any, sd_value: Any, name: str) -> Any:
        """Return the value given here or the saved one, as the two flags say.

        Raises:
            ScheduleError: the values differ and neither flag is set.
        """
        override = self.override_opt_param_scheduler
        if override is True or (isinstance(override, frozenset) and name in override):
            return sd_value if name in self._not_given else cls_value
        if not (self.use_checkpoint_opt_param_scheduler or name in self._not_given or cls_value == sd_value):
            raise ScheduleError(
                f"OptimizerParamScheduler: {name} is {cls_value!r} here and {sd_value!r} in the checkpoint; set "
                "use_checkpoint_opt_param_scheduler or override_opt_param_scheduler to say which to take"
            )
        return sd_value

    def load_state_dict(self, state_dict: Entries) -> None:
        """Set the step count and, as the two flags say, the settings; write the groups. An error changes nothing.

        Load the optimizer's state first: it brings back the groups, which may carry the `max_lr` and `min_lr` of their
        time. A group whose two values equal those saved here or given here, times its `lr_mult`, follows the loaded
        ones; any other group keeps its values as an override. States of Megatron-Core of any age are read.

        Raises:
            ScheduleError: fields are missing, differ although neither flag is set, or are invalid together.
        """
        saved = _read_state(state_dict)
        num_steps = saved.pop("num_steps")
        given = asdict(self.settings)
        chosen = given | {name: self._check_and_set(given[name], value, name) for name, value in saved.items()}
        settings = Settings(**chosen)
        groups = self.param_groups
        refuse_foreign(groups)
        changed = [{**group, **_followed(group, (given, saved), chosen)} for group in groups]
        values = group_values(settings, changed, num_steps)
        self._log_differences(given, saved, chosen)

        self.settings = settings
        self.num_steps = num_steps
        for group, entries in zip(groups, changed, strict=True):
            group.update(entries)
        self._write_values(groups, values)

    def _log_differences(self, given: Entries, saved: Entries, chosen: Entries) -> None:
        """Log both values of every setting that differs between this scheduler and the checkpoint."""
        for name in saved:
            if name in self._not_given or given[name] == saved[name]:
                continue
            if chosen[name] == given[name]:
                how = "%s=%r, given when the scheduler was built, replaces the checkpoint's %r"
                logger.info(how, name, given[name], saved[name])
            else:
                logger.warning(
                    "%s=%r of the checkpoint replaces %r, given when the scheduler was built; to keep the latter, set "
                    "override_opt_param_scheduler=[%r]", name, saved[name], given[name], name,
                )  # fmt: skip


def _read_state(state_dict: Entries) -> Plain:
    """Return the saved settings and `num_steps` under their present names, from older containers and keys too.

    Raises:
        ScheduleError: missing fields (all are listed), an invalid step count, or a newer version.
    """
    for container in ("opt_param_scheduler", "lr_scheduler"):
        if isinstance(state_dict.get(container), Mapping):
            state_dict = state_dict[container]
    check_state("OptimizerParamScheduler", state_dict, ())
    found = {}
    missing = []
    for name, older in _OLDER_KEYS.items():
        keys = [*older, name]
        present = [key for key in keys if key in state_dict]
        if present:
            found[name] = state_dict[present[0]]
        else:
            missing.append(f"{name} is missing (keys: {', '.join(keys)})")
    refuse(missing, where="OptimizerParamScheduler: state")
    found |= {name: state_dict[name] for name in SETTINGS if name in state_dict}
    num_steps = found["num_steps"]
    if not is_number(num_steps) or not num_steps >= 0:
        raise ScheduleError(f"OptimizerParamScheduler: state: num_steps={num_steps!r} must be a number, at least 0")
    return found


def _followed(group: Group, origins: Iterable[Entries], chosen: Entries) -> dict[str, float]:
    """Return the chosen bounds that replace those of `group`, if its own follow from one of the `origins`: are copies,
    times its `lr_mult`."""
    lr_mult = group.get("lr_mult", 1.0)
    own = {name: group[name] for name in ("max_lr", "min_lr") if group.get(name) is not None}
    follows = any(all(origin[name] * lr_mult == value for name, value in own.items()) for origin in origins)
    return {name: chosen[name] * lr_mult for name in own if follows}


def _checked_override(override: bool | Collection[str] | None, *, use_checkpoint: bool) -> bool | frozenset[str]:
    """Return the flag as a bool, or as a set of field names."""
    if override is True and use_checkpoint:
        raise ScheduleError(
            "OptimizerParamScheduler: override_opt_param_scheduler and use_checkpoint_opt_param_scheduler "
            "contradict each other; set one of them to False, or override only the fields you name"
        )
    if override is None or isinstance(override, bool):
        return bool(override)
    names = frozenset(override)
    for name in sorted(names.difference(SETTINGS)):
        raise ScheduleError(
            unknown_name("OptimizerParamScheduler: override_opt_param_scheduler: field", name, SETTINGS)
        )
    return names


def get_canonical_lr_for_logging(param_groups: Iterable[Entries]) -> float | None:
    """Return the learning rate to log: that of the first group with `default_config=True`.

    As in Megatron-Core, None if there is no such group or it has no `lr` yet.

    >>> get_canonical_lr_for_logging([{"lr": 1e-5, "default_config": False}, {"lr": 1e-3, "default_config": True}])
    0.001
    """
    return next((group.get("lr") for group in param_groups if group.get("default_config", False)), None)
