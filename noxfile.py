#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.5.1", "uv>=0.7"]
# ///
"""Every check of the repository, one session each: `nox -l` lists them, `nox -s NAME` runs one.

TORCH_SOURCE selects where torch is installed from: `local` (a wheel in a folder of UV_FIND_LINKS or PIP_FIND_LINKS),
`cpu` (PyTorch's CPU index), `pypi`, or `auto`, the default: local if there is a wheel, else cpu.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import cache_from_source
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "bare", "layers", "lint", "types"]

ROOT = Path(__file__).parent
GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TORCHES = ["2.6.0", "2.13.0", "newest"]
PACKAGES = [f"opt-{n}" for n in ("config", "scheduler", "paramgroups", "kernels", "checkpoint", "distributed", "stack")]
WITHOUT_TORCH = ["opt-scheduler"]
TWO_AT_A_TIME = ["pytest", "-n", "2", "--dist", "worksteal"]  # each worker takes half of the files, in order
# Each worker takes the next file, whole, so that worlds of ranks and fixtures are made once; ranks often wait.
FILE_BY_FILE = ["pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
OUTCOMES = ".nox/outcomes/{}.json"  # the tests that each run of `tests` ran and skipped
RECORDED: list[str] = []
# What `nightly` runs: all folders of tests, in parts that take less than two hours; and other sessions.
PARTS = {
    "packages": [f"packages/opt-{n}/tests" for n in ("config", "scheduler", "paramgroups", "distributed", "stack")],
    "checkpoint": ["packages/opt-checkpoint/tests"],
    "kernels": ["packages/opt-kernels/tests", "kernels"],
    "device": [f"integration_tests/{name}" for name in ("device", "offload")],
    "steps": [f"integration_tests/{name}" for name in ("fp8", "ranks", "saving", "steps")],
    "modes": ["integration_tests/modes"],
    "fuzz": ["integration_tests/fuzz"],
    "project": ["integration_tests/project"],
}
OTHER_NIGHTLY = ["planted", "trainers", "engines", "megatron", "megatron_newest", "jax", "s3", "checkout"]
# Each in a process of its own: importing Megatron-Core changes which classes torch.load accepts.
BESIDE_MEGATRON = [
    "packages/opt-checkpoint/tests_megatron",
    "integration_tests/trainers/test_megatron_bridge.py",
    "integration_tests/trainers/test_megatron_model.py",
    "integration_tests/trainers/test_emerging_optimizers.py",
]
INSPECT_DIST = ["pytest", "--noconftest", "integration_tests/project/wheels.py"]
# Folders of wheels on this machine: of uv's variable, else of pip's, which uv does not read.
WHEELS = os.environ.get("UV_FIND_LINKS", ",".join(os.environ.get("PIP_FIND_LINKS", "").split()))
# What PyPI's Linux wheels of torch require and a run without a GPU never loads.
SKIP_ON_CPU = ["triton", *(f"nvidia-{name}{suffix}" for name in ("cusolver", "nvtx") for suffix in ("", "-cu12"))]
# pyenv's shims answer only for the version in use; its real interpreters are one folder further.
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, sorted(PYENV.glob("3.1?.*/bin")))])
os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small processes; more threads than cores slow them all down
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # else each of hundreds of processes compiles torch's sources again
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(ROOT / ".nox" / "bytecode")


# --- environments -----------------------------------------------------------------------------------------------------


def install_torch(session: nox.Session, spec: str = ">=2.6") -> None:
    """Install torch before other packages, which then find their requirement met and keep it."""
    source = os.environ.get("TORCH_SOURCE", "auto")
    if source in ("auto", "local") and WHEELS:
        options = ("--no-index", "--no-deps", "--prerelease=allow")
        try:
            session.install(*options, f"torch{spec}", env={"UV_FIND_LINKS": WHEELS})
        except CommandFailed:
            session.log(f"no wheel of torch{spec} for this python in {WHEELS}")
        else:
            session.install(f"torch{spec}")  # its few plain dependencies
            return
    if source == "local":
        session.skip(f"no wheel of torch{spec} for this python in {WHEELS or 'any folder'}")
    if source == "pypi":
        skip = Path(session.create_tmp()) / "skip.txt"
        skip.write_text("\n".join(SKIP_ON_CPU))
        session.env["UV_EXCLUDE"] = str(skip)  # for this and every later install of the session
        session.install(f"torch{spec}")
    else:
        session.install("--torch-backend=cpu", f"torch{spec}")


def requirements(package: str) -> list[str]:
    """`package` and the packages of this repository that it depends on, lowest first."""
    declared = nox.project.load_toml(f"packages/{package}/pyproject.toml")["project"]["dependencies"]
    below = {line.split(">=")[0] for line in declared}
    return [name for name in PACKAGES if name == package or name in below]


def install(session: nox.Session, *names: str, groups: tuple[str, ...] = ("test",), torch: str = ">=2.6") -> None:
    """Install torch, unless no package needs it, and the packages; without names, all of them."""
    if names != tuple(WITHOUT_TORCH):
        install_torch(session, torch)
    # Packages that are installed only as requirements would be copies.
    editable = [part for name in names or PACKAGES for part in ("-e", f"packages/{name}")]
    session.install(*(line for group in groups for line in GROUPS[group]), *editable)
    reuse_bytecode(session)


def reuse_bytecode(session: nox.Session) -> None:
    """Copy what Python compiled in the newest other environment; it replaces what does not fit its source."""
    for here in Path(session.virtualenv.location).glob("lib/python*/site-packages"):
        others = [torch.parent for torch in here.parents[3].glob(f"*/lib/{here.parent.name}/site-packages/torch")]
        newest = max(others, key=lambda site: (site != here, site.stat().st_ctime), default=here)
        for source in newest.rglob("*.py") if newest != here else ():
            same = here / source.relative_to(newest)
            compiled, wanted = (Path(cache_from_source(str(one))) for one in (source, same))
            if compiled.exists() and same.exists() and not wanted.exists():
                wanted.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(compiled, wanted)


def uninstall_packages(session: nox.Session, *, before: str) -> None:
    """Remove the packages of this repository, and install torch if `before`, the next to be installed, needs it."""
    session.run("uv", "pip", "uninstall", "-q", *PACKAGES)
    if before not in WITHOUT_TORCH:
        install_torch(session)


def run_recorded(session: nox.Session, name: str, *command: str, options: list[str]) -> None:
    """Run pytest, and record which tests it ran unless options select some."""
    session.run(*command, f"--outcomes={OUTCOMES.format(name)}", *options)
    RECORDED.extend([name] * (not options))


@nox.session
@nox.parametrize("package", [*PACKAGES, "all"], ids=[*PACKAGES, "all"])
def tests(session: nox.Session, package: str) -> None:
    """The tests: each package with only its declared dependencies, then everything together. None may run nowhere."""
    if package != "all":
        install(session, *requirements(package))
        run_recorded(session, package, *TWO_AT_A_TIME, f"packages/{package}/tests", options=session.posargs)
        return
    install(session, groups=("test", "kernels", "lint", "extras"))
    run_recorded(session, "together", *FILE_BY_FILE, "kernels", "integration_tests", options=session.posargs)
    folders = [f"packages/{name}/tests" for name in PACKAGES]
    run_recorded(session, "extras", *TWO_AT_A_TIME, "-m", "needs_extra", *folders, options=session.posargs)
    if {*PACKAGES, "together", "extras"} <= {*RECORDED}:
        session.run("python", "integration_tests/support/outcomes.py", *map(OUTCOMES.format, RECORDED))


@nox.session
def bare(session: nox.Session) -> None:
    """opt-scheduler where torch is not installed."""
    install(session, "opt-scheduler")
    session.run("python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None")
    session.run("pytest", "packages/opt-scheduler/tests", *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Check import contracts: imports between and inside packages only point down."""
    install(session, groups=("lint", "test"))
    session.run("lint-imports", "--no-cache")
    session.run("pytest", "integration_tests/project/test_layers.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: style and format; codespell."""
    session.install(*GROUPS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over every package, the benchmarks and the workbench of kernels."""
    install(session, groups=("types", "test"))
    folders = [*Path("packages").glob("*/src"), Path("kernels"), *Path("packages").glob("*/benchmarks")]
    session.run("mypy", *map(str, folders))


@nox.session(default=False, venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Everything, whole: hours. `.github/workflows/nightly.yml` runs each part; a release needs it."""
    for part in (*(f"whole({part})" for part in PARTS), *OTHER_NIGHTLY):
        session.notify(part)


@nox.session(default=False)
@nox.parametrize("part", [*PARTS], ids=[*PARTS])
def whole(session: nox.Session, part: str) -> None:
    """A part of the tests at night: those marked `nightly` too, whole grids, thousands of seeds and orders."""
    install(session, groups=("test", "kernels", "extras", "docs"))
    workers = TWO_AT_A_TIME if part in ("device", "modes", "fuzz") else FILE_BY_FILE  # few files of many cases
    session.run(*workers, "--nightly", *PARTS[part], *session.posargs)


@nox.session(default=False)
def planted(session: nox.Session) -> None:
    """A hundred faults in the sources, drawn by a seed, and which of them the default tests do not notice."""
    install(session, groups=("test", "kernels", "extras"))
    session.run("python", "integration_tests/project/plant_faults.py", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The site, in site/: a broken link or reference fails it. The code of its pages runs in `tests`."""
    install(session, groups=("extras", "docs"))
    session.run("sphinx-build", "-b", "html", "-W", "--keep-going", "docs", "site", *session.posargs)


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Train a small GPT on two ranks, stop, resume, and draw the losses."""
    install(session, groups=("examples",))
    session.run("python", "examples/quickstart.py", *session.posargs)


# --- other versions, and what is shipped ------------------------------------------------------------------------------


@nox.session(python=PYTHONS, default=False, tags=["matrix"])
@nox.parametrize("torch", TORCHES)
def matrix(session: nox.Session, torch: str) -> None:
    """All packages' tests on every python and torch. Versions that cannot be installed are skipped with the reason."""
    spec = ">=2.6" if torch == "newest" else f"=={torch}"
    try:
        install_torch(session, spec)
    except CommandFailed as failure:
        session.skip(f"no torch {torch} on python {session.python}: {failure}; TORCH_SOURCE=pypi loads PyPI's, 3 GB")
    install(session, torch=spec)
    session.run(*FILE_BY_FILE, "packages", "integration_tests", *session.posargs)


@nox.session(default=False)
def minimums(session: nox.Session) -> None:
    """Every declared lower bound at once, torch 2.6.0 among them."""
    session.env["UV_RESOLUTION"] = "lowest-direct"
    install(session, torch="==2.6.0")
    session.run("uv", "pip", "list")
    session.run(*FILE_BY_FILE, "packages", "integration_tests", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the files to publish into dist/. `-- --check` inspects and installs them, `--tag v0.1.0` checks a version.

    On GitHub's CI, links in READMEs and project URLs point to the repository's page; OPT_STACK_URL sets another one.
    """
    arguments = [word for word in session.posargs if word != "--check"]
    work = Path(session.create_tmp())
    dist = ROOT / "dist"
    server, repository = (os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY"))
    url = os.environ.get("OPT_STACK_URL") or (f"{server}/{repository}" if repository else "")
    session.run("python", "release/stage.py", str(work / "staged"), "--url", url, *arguments)
    shutil.rmtree(dist, ignore_errors=True)
    for package in PACKAGES:
        session.run("uv", "build", "-q", "--no-sources", "--out-dir", str(dist), str(work / "staged" / package))
    (dist / ".gitignore").unlink(missing_ok=True)  # uv's
    if "--check" not in session.posargs:
        return
    session.install("twine>=6", "hatchling>=1.26", *GROUPS["test"])
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    session.run(*INSPECT_DIST, env={"OPT_STACK_DIST": str(dist), "OPT_STACK_RELEASE": "1"})
    for package in PACKAGES:
        (sdist,) = dist.glob(f"{package.replace('-', '_')}-*.tar.gz")
        for what in (package, str(sdist)):
            uninstall_packages(session, before=package)
            # From dist/ alone: a name of ours on an index could be anybody's.
            session.install("--no-index", "--find-links", str(dist), "--no-build-isolation", what)
            session.run("python", "release/example.py", package, str(work / "examples"), env={"PYTHONPATH": None})


@nox.session(default=False)
def changelog(session: nox.Session) -> None:
    """Moves the fragments of packages/*/changelog.d into the changelogs: `-- 0.2.0`; `-- 0.2.0 --draft` prints them."""
    if not session.posargs:
        session.error("give the version of the release: nox -s changelog -- 0.2.0")
    session.install(*GROUPS["changelog"])
    version, *options = session.posargs
    for package in PACKAGES:
        if any(Path("packages", package, "changelog.d").glob("*.md")):
            where = ("--dir", f"packages/{package}", "--config", "pyproject.toml")
            session.run("towncrier", "build", "--yes", *where, "--version", version, *options)


@nox.session(default=False)
def checkout(session: nox.Session) -> None:
    """Runs each README's one command that installs from a checkout, and an example of that README."""
    for package in PACKAGES:
        uninstall_packages(session, before=package)
        readme = (ROOT / "packages" / package / "README.md").read_text()
        (command,) = re.findall(r"^python -m (pip install (?:[ \\\n]*\./packages/\S+)+)", readme, re.MULTILINE)
        session.run("bash", "-c", f"uv {command}", external=True)
        session.run("python", "release/example.py", package, session.create_tmp(), env={"PYTHONPATH": None})


@nox.session(default=False)
def trainers(session: nox.Session) -> None:
    """Inside Lightning, Accelerate, the HF Trainer and torchtitan: real installs, a toy model, save and resume."""
    install(session, groups=("test", "trainers", "kernels"))  # torchtitan imports triton
    session.run("pytest", "packages/opt-scheduler/tests_trainers", "integration_tests/trainers", *session.posargs)
    docs = "integration_tests/project/test_docs.py"
    session.run("pytest", f"{docs}::test_the_program_for_the_trainer_trains", *session.posargs)


@nox.session(python="3.11", default=False)
def engines(session: nox.Session) -> None:
    """A run carried by Ray Train: a worker is killed, all are restarted, and the end is that of the whole run."""
    install(session, groups=("test", "engines"))
    session.run("pytest", "integration_tests/engines", *session.posargs)


@nox.session(default=False)
def jax(session: nox.Session) -> None:
    """Schedules under `jax.jit`, in optax and in Keras, with real installs."""
    install(session, "opt-scheduler", groups=("test", "jax"))
    chosen = ["packages/opt-scheduler/tests", "integration_tests/project/test_doctests.py"]
    chosen += ["-k", "jax or optax or array or readme or keras"]
    session.run("pytest", *chosen, *session.posargs, env={"KERAS_BACKEND": "jax"})


@nox.session(python="3.11", default=False)
def megatron(session: nox.Session) -> None:
    """Megatron-Core on gloo ranks: reads directories in each of its formats, and trains in its own wrapper."""
    install(session, torch="==2.13.0")
    session.install("--no-deps", "megatron-core==0.16.1")
    session.install("numpy>=2", "packaging", "psutil", "setuptools")
    old = Path(session.create_tmp()) / "megatron-0.12"  # the last versions that write `fully_sharded_model_space`
    session.install("--no-deps", "--target", str(old), "megatron-core==0.12.3")
    env = {"OPT_MEGATRON_OLD": str(old)}
    for tests in BESIDE_MEGATRON:
        session.run("pytest", tests, *session.posargs, env=env)


@nox.session(python="3.12", default=False)
def megatron_newest(session: nox.Session) -> None:
    """The same next to the newest Megatron-Core: it needs Python 3.12 and triton, and cannot read with torch 2.15."""
    install(session, torch="==2.13.0")
    session.install("--no-deps", "megatron-core==0.19.2", "emerging-optimizers==0.3.0")
    session.install("absl-py", "numpy>=2", "packaging", "psutil", "setuptools")
    session.install("--no-deps", "triton>=3.9", env={"UV_EXCLUDE": None})  # which `install_torch` may leave out
    for tests in BESIDE_MEGATRON:
        session.run("pytest", tests, *session.posargs)


@nox.session(default=False)
def s3(session: nox.Session) -> None:
    """Checkpoints in a bucket of a server that speaks S3, on this machine."""
    install(session, "opt-checkpoint")
    session.install("obstore>=0.6", "moto[server]>=5")
    session.run("pytest", "packages/opt-checkpoint/tests_s3", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Ratios against peers in the same run, written as JSON under kernels/results."""
    install(session, groups=("test", "kernels"))
    session.run("python", "kernels/bench.py", *session.posargs, env={"OMP_NUM_THREADS": str(os.cpu_count())})


@nox.session(default=False)
def leaderboard(session: nox.Session) -> None:
    """Which rule should I use: every rule tuned and trained on a small GPT; resumes where it was. Six hours."""
    install(session, groups=("examples",))
    for options in [session.posargs] if session.posargs else ([], ["--times"], ["--report", "kernels/results"]):
        session.run("python", "examples/leaderboard.py", *options)


@nox.session(default=False)
def numbers(session: nox.Session) -> None:
    """Which numbers should I use: a small GPT trained in every format, a minute each; resumes where it was."""
    install(session, groups=("examples",))
    for options in ((), ("--report", "kernels/results")):
        session.run("python", "examples/which_numbers.py", *options, *session.posargs)
