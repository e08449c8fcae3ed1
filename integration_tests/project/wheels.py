"""What each wheel must and must not contain; run by `nox -s release -- --check`, which builds them first."""

import os
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

PACKAGES = sorted(folder.name for folder in (Path(__file__).parents[2] / "packages").iterdir())


def wheel_of(package: str) -> zipfile.ZipFile:
    (path,) = Path(os.environ["OPT_STACK_DIST"]).glob(f"{package.replace('-', '_')}-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(params=PACKAGES)
def wheel(request: pytest.FixtureRequest) -> zipfile.ZipFile:
    return wheel_of(request.param)


def import_name(wheel: zipfile.ZipFile) -> str:
    return Path(str(wheel.filename)).name.split("-")[0]


def metadata(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    message = Parser().parsestr(wheel.read(name).decode())
    return {key: message.get_all(key, []) for key in set(message.keys())}


def test_a_wheel_holds_its_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    name = import_name(wheel)
    tops = {entry.split("/")[0] for entry in wheel.namelist()}
    assert tops == {name, *(top for top in tops if top.endswith(".dist-info"))}
    assert {f"{name}/__init__.py", f"{name}/py.typed"} <= set(wheel.namelist())
    assert not [entry for entry in wheel.namelist() if "/tests/" in entry or entry.endswith((".so", ".pyc", ".pt"))]


def test_its_metadata_is_of_a_version_every_index_takes(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)
    assert found["Metadata-Version"] == ["2.4"]
    assert found["License-Expression"] == ["Apache-2.0"]
    assert found["Requires-Python"] == [">=3.11"]
    assert all(found[key] != [""] for key in ("Summary", "Keywords", "Author"))
    assert found["Description-Content-Type"] == ["text/markdown"]
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.14"} <= set(found["Classifier"])


def test_it_asks_for_no_torch_of_an_index_of_its_own(wheel: zipfile.ZipFile) -> None:
    lines = metadata(wheel).get("Requires-Dist", [])
    torch = [line for line in lines if line.startswith("torch") and "extra ==" not in line]
    assert torch == ([] if import_name(wheel) == "opt_scheduler" else ["torch>=2.6"])
    assert not [line for line in lines if "@" in line or "file:" in line]


def test_the_triton_sources_are_in_the_kernels_wheel() -> None:
    names = wheel_of("opt-kernels").namelist()
    assert "opt_kernels/backends/triton/update.py" in names
    assert {f"opt_kernels/backends/cpp/{name}.h" for name in ("elements", "formats", "codecs", "update")} <= {*names}


@pytest.mark.skipif("OPT_STACK_RELEASE" not in os.environ, reason="only what is published pins its siblings")
def test_a_published_wheel_needs_its_siblings_at_its_own_version(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)
    ours = [line for line in found.get("Requires-Dist", []) if line.startswith("opt-")]
    assert all(line.endswith(f"=={found['Version'][0]}") for line in ours)
    assert bool(ours) == (import_name(wheel) in ("opt_paramgroups", "opt_distributed", "opt_stack"))


@pytest.mark.parametrize("package", PACKAGES)
def test_an_sdist_holds_sources_tests_and_the_licence(package: str) -> None:
    found = list(Path(os.environ["OPT_STACK_DIST"]).glob(f"{package.replace('-', '_')}-*.tar.gz"))
    if not found and "OPT_STACK_RELEASE" not in os.environ:
        pytest.skip("only `nox -s release` builds source distributions")
    (path,) = found
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"} <= names
    assert f"src/{package.replace('-', '_')}/__init__.py" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".zip")]
    assert path.stat().st_size < 1_000_000
