"""Compiles C++ sources and loads the libraries, once per machine: they are cached on disk.

The compiler is `$CXX`, which may include arguments, or the first of `c++`, `g++` and `clang++` in the PATH.
`OPT_KERNELS_CPP=0` disables it. Cache key: source, flags, compiler version and CPU.

The cache is `$OPT_KERNELS_CACHE`, else `$XDG_CACHE_HOME/opt-kernels`: a folder that only this user can write to, with
files that are checked before use. The name of a file ends in the SHA-256 of its content. A truncated file, after a
power loss or on a full disk, does not match its name; loading it would crash the process. A folder that belongs to or
can be written by another user is not used, because that user could run code in this process.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

ELEMENTS = Path(__file__).with_name("elements.h")
PROBE = Path(__file__).with_name("probe.cpp")
# `-fno-fast-math` undoes options of CXX. Without contraction, so that the bits of an element do not depend on where the
# compiler uses fused products. The next two flags allow loops with roots and comparisons to be vectorised, and change
# no result.
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++17",
)
# By default compilers use only half the width of AVX-512; sweeps of 8-bit states then take 10 % longer.
X86_FLAGS = ("-mprefer-vector-width=512",)
TIMEOUT = 120  # seconds; a sweep takes a fraction of one

_LOG = logging.getLogger(__name__)


class CompilerError(RuntimeError):
    """The compiler failed; the message is that of the compiler."""


@cache
def usable() -> bool:
    """Whether a working compiler is available. Logs a warning once if not."""
    if sys.platform == "win32" or os.environ.get("OPT_KERNELS_CPP") == "0":
        return False
    probe = attempt(PROBE)
    if probe is None:
        return False
    # Operations that code of this compiler may round, reorder or omit wrongly.
    names = ("(a + b) - b", "a * b + c", "a / b", "a != a")
    results = (ctypes.c_float * len(names))()
    inputs = (ctypes.c_float * 6)(1.0, 2.0**24, 1.0 + 2.0**-12, -1.0 - 2.0**-11, 5.0, 49.0)
    probe.numbers(inputs, results)
    expected = (0.0, 0.0, ctypes.c_float(5.0 / 49.0).value, 1.0)
    wrong = [name for name, got, right in zip(names, results, expected) if got != right]
    if wrong:
        _warn_once(f"{shlex.join(_command())} computes {', '.join(wrong)} otherwise than IEEE 754; remove its options")
    return not wrong


class Source(NamedTuple):
    """A source, with the name of its libraries."""

    name: str
    text: str


@cache
def attempt(source: Path | Source, **macros: str | int) -> ctypes.CDLL | None:
    """The library. If it cannot be compiled, stored or loaded, log a warning once and return None.

    Steps then use torch operations, so a full disk or a failing compiler does not stop training.
    """
    try:
        return library(source, **macros)
    except (CompilerError, OSError, subprocess.SubprocessError) as error:
        _warn_once(str(error))
        return None


@cache
def library(source: Path | Source, **macros: str | int) -> ctypes.CDLL:
    """`source` compiled after `elements.h` with these macros, and loaded.

    Raises CompilerError with the compiler's message.
    """
    name, content = source if isinstance(source, Source) else Source(source.stem, source.read_text())
    text = f"{ELEMENTS.read_text()}\n{content}"
    definitions = [f"-D{macro}={value}" for macro, value in sorted(macros.items())]
    flags = (*FLAGS, *(X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()), *definitions)
    stem = f"{name}-{_digest(text, flags)}"
    with _compiling(os.getpid()):
        return ctypes.CDLL(str(find_cached(stem) or _compile(text, flags, stem)))


@cache
def _warned() -> list[str]:
    """The reasons that this process has logged."""
    return []


def _warn_once(reason: str) -> None:
    log = _LOG.info if _warned() else _LOG.warning
    log(
        "CPU steps run on torch's operations instead of compiled sweeps, up to 40 times as slow with 8-bit or fp8 "
        "states: %s (set OPT_KERNELS_CPP=0 to choose that)",
        reason,
    )
    _warned().append(reason)


@cache
def _compiling(process: int) -> Lock:
    """Held by the thread that compiles, so that others find its library. A forked process has a lock of its own."""
    return Lock()


def _compile(text: str, flags: Sequence[str], stem: str) -> Path:
    """Compile to a separate file and rename it, because ranks that start together may all compile."""
    make_folder(cache_folder())  # again, in case the cache was cleared
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        made = Path(folder) / f"{stem}.so"
        command = [*_command(), "-shared", "-fPIC", "-x", "c++", "-", *flags, "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise CompilerError(f"{shlex.join(_command())}: {done.stderr.strip() or f'status {done.returncode}'}")
        return keep(stem, made)


def _digest(text: str, flags: Sequence[str]) -> str:
    parts = (text, *flags, *_command()[1:], _compiler_version(), _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@cache
def _compiler() -> tuple[str, ...] | None:
    """The command of the compiler, or None."""
    named = shlex.split(os.environ.get("CXX", ""))
    for name, *options in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if found := shutil.which(name):
            return (found, *options)
    return None


def _command() -> tuple[str, ...]:
    command = _compiler()
    if command is None:
        given = os.environ.get("CXX")
        reason = f"CXX={given} is not found" if given else "no C++ compiler is found (c++, g++, clang++)"
        raise CompilerError(f"{reason}; install one, or name it in CXX")
    return command


@cache
def _compiler_version() -> str:
    command = [*_command(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout


@cache
def _processor() -> str:
    """The CPU, on which `-march=native` depends: machines with a shared home folder must not share libraries."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    features = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join((sys.platform, platform.machine(), platform.processor(), *sorted(features)))


@cache
def cache_folder() -> Path:
    """The folder for libraries: `$OPT_KERNELS_CACHE`, or `opt-kernels` in the user's cache; else a temporary one.

    Logs a warning if it has to use a temporary folder.
    """
    named = _named()
    reason = "this user has no home folder" if named is None else _problem(named)
    if named is not None and reason is None:
        return named
    temporary = Path(tempfile.mkdtemp(prefix="opt-kernels-"))
    atexit.register(_remove, temporary, os.getpid())
    _LOG.warning(
        "compiled CPU sweeps are kept for this process only, in %s: %s; set OPT_KERNELS_CACHE to a folder of your own",
        temporary,
        reason,
    )
    return temporary


def find_cached(stem: str) -> Path | None:
    """The intact library of this name. Corrupt files of this name are removed."""
    for path in sorted(cache_folder().glob(f"{stem}-*.so")):
        try:
            if path.name == _name(stem, path.read_bytes()):
                return path
            path.unlink()
        except FileNotFoundError:  # another process has removed it
            pass
    return None


def keep(stem: str, made: Path) -> Path:
    """Move the library `made` into the folder atomically, after it was synced. It must be on the same file system."""
    path = cache_folder() / _name(stem, made.read_bytes())
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(path)
    return path


def make_folder(path: Path) -> None:
    """Create the folder `path`, accessible to this user only, if it does not exist."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


def _name(stem: str, content: bytes) -> str:
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _named() -> Path | None:
    """The folder that the environment selects, or None."""
    if given := os.environ.get("OPT_KERNELS_CACHE"):
        return Path(given).absolute()
    # XDG's specification: relative paths are invalid and ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # unchanged without HOME and an entry in the password database
    if os.path.isabs(base):
        return Path(base) / "opt-kernels"
    return Path(home) / ".cache" / "opt-kernels" if os.path.isabs(home) else None


def _problem(path: Path) -> str | None:
    """Why `path` cannot hold libraries; None if it can."""
    try:
        make_folder(path)
        status = path.stat()
        if status.st_uid != os.geteuid():
            return f"{path} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} can be written by others (chmod go-w)"
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{path} cannot be written: {error}"


def _remove(path: Path, process: int) -> None:
    """Remove the folder at the end of the process that created it, not of a forked child."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
