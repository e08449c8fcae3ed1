"""No module imports torch.distributed: process groups are constructor arguments."""

import re
from pathlib import Path

import opt_paramgroups


def test_no_file_imports_torch_distributed():
    importing = re.compile(r"^\s*(import|from) torch\.distributed|^\s*from torch import .*distributed", re.M)
    assert importing.search("    from torch import distributed")
    sources = sorted(Path(opt_paramgroups.__file__).parent.glob("*.py"))
    assert [path.name for path in sources if importing.search(path.read_text())] == []
