"""The cache of compiled libraries: a folder that only this user can write to, with files that are checked before use.

The name of a file ends in the SHA-256 of its content. A truncated file, after a power loss or on a full disk, does not
match its name; loading it would crash the process. A folder that belongs to or can be written by another user is not
used, because that user could run code in this process.
"""

import atexit
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

_LOG = logging.getLogger(__name__)


@cache
def folder() -> Path:
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


def find(stem: str) -> Path | None:
    """The intact library of this name. Corrupt files of this name are removed."""
    for path in sorted(folder().glob(f"{stem}-*.so")):
        try:
            if path.name == _name(stem, path.read_bytes()):
                return path
            path.unlink()
        except FileNotFoundError:  # another process has removed it
            pass
    return None


def keep(stem: str, made: Path) -> Path:
    """Move the library `made` into the folder atomically, after it was synced. It must be on the same file system."""
    path = folder() / _name(stem, made.read_bytes())
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(path)
    return path


def make(path: Path) -> None:
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
        make(path)
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
