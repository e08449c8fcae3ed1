"""What imports load: nothing that takes longer than this package."""

import subprocess
import sys

import pytest

LATE = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton")


@pytest.mark.parametrize("program", ["import opt_kernels", "from opt_kernels import AdamW, Muon, Rule"])
def test_imports_load_no_compiler_and_no_dtensors(program: str) -> None:
    script = (
        f"import sys, torch; before = set(sys.modules); {program}; "
        f"loaded = [name for name in {LATE} if name in sys.modules and name not in before]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_public_names_are_imported_at_their_first_use() -> None:
    script = (
        "import sys, opt_kernels; assert 'opt_kernels.optim' not in sys.modules; assert 'AdamW' in dir(opt_kernels)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
