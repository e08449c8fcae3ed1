"""What `update_` of a custom rule may return: nothing, or launches that later steps repeat."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.comm import device as devices
from opt_distributed.comm.device import Host
from opt_kernels.codecs import StateCodec
from opt_kernels.rules.base import Needs
from opt_kernels.works import Batch, StateSpec, Work
from opt_stack import Optimizer, Registry, RuleEntry, get_optimizer

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.needs_extra


class Asynchronous(Host):
    """A CPU that is taken for an accelerator, so that updates are kept."""

    is_asynchronous = True


@dataclass
class Descent:
    """Gradient descent with a step of 1. It returns what `returns` makes of the works."""

    returns: Callable[[list[Work]], Any]
    name: ClassVar[str] = "mine"
    needs: ClassVar[Needs] = Needs.ELEMENTS
    backend: ClassVar[str] = "triton"  # its launches can be kept
    state_specs: ClassVar[tuple[StateSpec, ...]] = ()
    codecs: ClassVar[Mapping[str, StateCodec]] = {}

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return {}

    def update_(self, batches: Sequence[Batch], *, grad_scale: Any = 1.0, skip: Tensor | None = None) -> Any:
        works = [work for batch in batches for work in batch.works]
        Launch(works).launch()
        return self.returns(works)


@dataclass
class Launch:
    works: list[Work]

    def holds(self) -> bool:
        return True

    def launch(self) -> None:
        for work in self.works:
            assert work.main is not None
            work.main.sub_(work.grad)


class OnlyLaunch:
    def launch(self) -> None:
        raise AssertionError("never repeated")


def build(returns: Callable[[list[Work]], Any]) -> tuple[nn.Linear, Optimizer]:
    entry = RuleEntry(name="mine", summary="", make=lambda config: Descent(returns), hyper=lambda config: {})
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.ones_like(model.weight)
    config = OptimizerConfig(optimizer="mine", lr=1.0, clip_grad=0.0)
    return model, get_optimizer(config, [model], rules=Registry().with_rule(entry))


@pytest.fixture(params=["host", "device"])
def decided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "device":
        queues = Asynchronous()
        monkeypatch.setattr(devices, "device_of", lambda device: queues)


@pytest.mark.parametrize(
    ("returns", "problem"),
    [
        pytest.param(lambda works: [OnlyLaunch()], "a sequence with an object of type OnlyLaunch", id="without-holds"),
        pytest.param(lambda works: [None], "a sequence with an object of type NoneType", id="none"),
        pytest.param(lambda works: [Launch(works), 1], "a sequence with an object of type int", id="one-of-two"),
        pytest.param(lambda works: "done", "a sequence with an object of type str", id="text"),
        pytest.param(lambda works: works[0].main, "an object of type Parameter", id="tensor"),
        pytest.param(lambda works: True, "an object of type bool", id="bool"),
        pytest.param(lambda works: iter([Launch(works)]), "an object of type list_iterator", id="iterator"),
    ],
)
def test_anything_else_is_refused_in_the_step_that_returned_it(
    returns: Callable[[list[Work]], Any], problem: str, decided: None
) -> None:
    """On a GPU the next step raised an AttributeError; on a CPU nothing did."""
    _, optimizer = build(returns)
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    assert f"rule 'mine' (Descent): update_ returned {problem}; allowed are None, and a sequence of" in str(
        caught.value
    )


@pytest.mark.parametrize(
    "returns",
    [
        pytest.param(lambda works: None, id="none"),
        pytest.param(lambda works: (), id="empty"),
        pytest.param(lambda works: [Launch(works)], id="list"),
        pytest.param(lambda works: (Launch(works),), id="tuple"),
    ],
)
def test_nothing_and_launches_are_allowed(returns: Callable[[list[Work]], Any], decided: None) -> None:
    model, optimizer = build(returns)
    for _ in range(4):
        optimizer.step()
    assert model.weight.tolist() == [[-4.0] * 3] * 2
