"""Float32 matrix products have the precision that a rule asks for, whatever the user has set, and the user's setting
stays."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from matrix_works import grads_of, moved, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opt_kernels.matrices import syrk
from opt_kernels.precision import MatmulPrecision, fp32_products, tf32_products
from opt_kernels.rules import AdaptiveMuonRule, MuonRule, Rule, SOAPRule

HAS_NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def settings() -> list[str]:
    """All that a user can set, in both APIs."""
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:
        legacy = "mixed"
    if not HAS_NEWER:
        return [legacy]
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn, torch.backends)
    return [legacy, *(switch.fp32_precision for switch in switches)]


@pytest.fixture(autouse=True)
def as_torch_begins() -> Iterator[None]:
    yield
    if HAS_NEWER:
        for switch in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
            switch.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    if HAS_NEWER:
        for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            switch.fp32_precision = "none"


USERS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "legacy": lambda: torch.set_float32_matmul_precision("high"),
    "newer-matmul": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "newer-everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


class AsOnAGpu(TorchDispatchMode):
    """Records how a GPU would do products of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.in_tf32: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in PRODUCTS and args[0].dtype is torch.float32:
            self.in_tf32.add(settings()[1] == "tf32" if HAS_NEWER else settings()[0] != "highest")
        return func(*args, **(kwargs or {}))


RULES: dict[str, tuple[Rule, set[bool]]] = {
    "muon": (MuonRule(backend="torch"), set()),
    "muon-high": (MuonRule(backend="torch", fp32_matmul_prec=MatmulPrecision.HIGH), {True}),
    "muon-highest": (MuonRule(backend="torch", fp32_matmul_prec=MatmulPrecision.HIGHEST), {False}),
    "adaptive": (AdaptiveMuonRule(muon=MuonRule(backend="torch", fp32_matmul_prec=MatmulPrecision.HIGHEST)), {False}),
    "soap": (SOAPRule(), {False}),
    "soap-householder": (SOAPRule(use_kl_shampoo=False, power_iterations=2), {False}),
}


@pytest.mark.parametrize("user", USERS)
def test_rules_choose_float32_precision_and_restore_the_users(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syrk, "multiplies_bfloat16", lambda: True)
    if user.startswith("newer") and not HAS_NEWER:
        pytest.skip("torch 2.9 brought this API")
    USERS[user]()
    before = settings()
    for name, (rule, in_tf32) in RULES.items():
        with AsOnAGpu() as gpu:
            moved(rule, tensor(24, 16), *grads_of(24, 16, steps=2))
        assert gpu.in_tf32 == in_tf32, name
        assert settings() == before, name


@pytest.mark.skipif(not HAS_NEWER, reason="torch 2.9 brought this API")
def test_an_inherited_setting_still_follows_the_user_afterwards() -> None:
    for users, wanted in (("tf32", MatmulPrecision.HIGHEST), ("ieee", MatmulPrecision.HIGH)):
        with fp32_products(wanted):
            assert tf32_products() is (wanted is MatmulPrecision.HIGH)
        torch.backends.fp32_precision = users
        assert tf32_products() is (users == "tf32")


def test_threads_of_other_precision_wait_and_restore_the_users() -> None:
    torch.set_float32_matmul_precision("high")
    inside = threading.Event()
    seen = []

    def want_highest() -> None:
        inside.wait(60)
        with fp32_products(MatmulPrecision.HIGHEST):
            seen.append(tf32_products())

    thread = threading.Thread(target=want_highest)
    thread.start()
    with fp32_products(MatmulPrecision.HIGH):
        inside.set()
        thread.join(0.2)
        seen.append(tf32_products())
    thread.join(60)
    assert seen == [True, False]
    assert torch.get_float32_matmul_precision() == "high"


def test_errors_restore_the_precision_and_nesting_is_refused() -> None:
    before = settings()
    highest = MatmulPrecision.HIGHEST
    with pytest.raises(ZeroDivisionError), fp32_products(MatmulPrecision.HIGH):
        raise ZeroDivisionError
    words = "products of precision 'high' inside a block of precision 'highest'"
    with fp32_products(highest), fp32_products(highest), pytest.raises(ValueError, match=words):
        fp32_products(MatmulPrecision.HIGH).__enter__()
    with fp32_products(MatmulPrecision.HIGH):
        assert tf32_products()
    assert settings() == before
