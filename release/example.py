"""Runs the first program of a README against the installed package: python release/example.py PACKAGE FOLDER."""

import importlib
import os
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(package: str, folder: Path) -> None:
    module = importlib.import_module(package.replace("-", "_"))
    where = Path(str(module.__file__)).resolve()
    if ROOT / "packages" in where.parents:
        sys.exit(f"{package} is imported from the checkout, {where}, and not from what was installed")
    program = re.findall(r"```python\n(.*?)```", (ROOT / "packages" / package / "README.md").read_text(), re.DOTALL)[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module.__name__}_example.py"
    path.write_text(program)
    os.chdir(folder)
    runpy.run_path(str(path), run_name="__main__")
    print(f"{package} {module.__version__}: the first program of its README runs, from {where.parent.parent.name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
