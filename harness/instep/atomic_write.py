"""Where a command's files go: a regular file is written whole or not at all; anything else is opened and written to.

Leaves out: what stands in the files, and whether one that is there may be lost (`trace/file.py` asks that).

    -                       stdout; what the command prints otherwise then goes to stderr (`cli/ending.py`)
    a symbolic link         is followed: its target is replaced, the link stays
    device, pipe, terminal  is opened and written to, and stays what it is
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from instep_reference.contract.errors import BadInput

STDOUT = Path("-")
STDOUT_FD = 1
NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
# A name of an open file: replacing what it leads to would take the file away from the process that has it open.
OPEN_FILES = ("/dev/fd/", "/dev/stderr", "/proc/")


class ReaderGone(BrokenPipeError):
    """Nobody reads the pipe any more that a file's content was written to."""


def write_atomically(files: Mapping[Path, bytes]) -> None:
    """Put every content in its place. A regular file is replaced in one step, when all contents are on the disk.

    What is no regular file is written first, so that no file is replaced when that fails.
    """
    for path in files:
        writable(path)
    replaced = {path: Path(os.path.realpath(path)) for path in files if is_replaced(path)}
    for path in files.keys() - replaced.keys():
        _write_into(path, files[path])
    with ExitStack() as stack:
        written: list[tuple[Path, Path]] = []
        for path, target in replaced.items():
            with _refused(path):
                # Beside the target: a file is moved in one step only within a file system.
                aside = stack.enter_context(tempfile.TemporaryDirectory(dir=target.parent, prefix=".whole-"))
                temporary = Path(aside, "content")
                temporary.write_bytes(files[path])
                _same_owner_and_mode(temporary, target)
                written.append((temporary, target))
        for temporary, target in written:
            with _refused(target):
                os.replace(temporary, target)


def writable(path: Path, *others: Path | None) -> None:
    """Refuse a place where nothing can be put: asked before work is done, and again before it is written.

    others: what the same command reads, or writes elsewhere; of a trace, the file of its tensors is meant, too.
    """
    with _refused(path):  # a link to itself, a name that is too long
        _writable(path, *others)


def folder_for(path: Path, field: str) -> None:
    """Make a folder for files, or refuse its place."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(field, found=f"{path}: {error.strerror}", expected="a folder that can be made") from None


def _writable(path: Path, *others: Path | None) -> None:
    for other in filter(None, others):
        for taken in (other, other.parent / f"{other.name.removesuffix('.jsonl')}.safetensors"):
            if _same(path, taken):
                raise BadInput(str(path), found="a file that this command uses otherwise", expected="a file of its own")
    if is_stdout(path):
        return
    there = _there(path)
    if there is not None:
        if stat.S_ISDIR(there.st_mode):
            raise BadInput(str(path), found="a folder", expected="the name of a file")
        if not os.access(path, os.W_OK):
            raise BadInput(str(path), found="a file that must not be written", expected="one that may be written")
    if is_replaced(path):
        folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            found = "a folder that cannot be written" if folder.is_dir() else "no such folder"
            raise BadInput(str(folder), found=found, expected="a folder that can be written")


def _there(path: Path) -> os.stat_result | None:
    """What stands at the end of the path, links followed; None when nothing does."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _same(path: Path, taken: Path) -> bool:
    """Whether both are one file. A device takes more than one content: /dev/null may be named twice."""
    if is_stdout(path) or is_stdout(taken):
        return is_stdout(path) and is_stdout(taken)
    one, other = _there(path), _there(taken)
    if one is None or other is None:
        return os.path.realpath(path) == os.path.realpath(taken)
    return os.path.samestat(one, other) and not stat.S_ISCHR(one.st_mode)


def is_stdout(path: Path) -> bool:
    """`-`, or one of the names that the system has for it."""
    return path == STDOUT or os.path.abspath(path) in NAMES_OF_STDOUT


def is_replaced(path: Path) -> bool:
    """Whether there is a regular file, or none, under a name of its own."""
    if is_stdout(path) or os.path.abspath(path).startswith(OPEN_FILES):
        return False
    there = _there(path)
    return there is None or stat.S_ISREG(there.st_mode)


def _write_into(path: Path, content: bytes) -> None:
    """Open and write; the buffer of `sys.stdout` is not used, so nothing is left in it when the write fails."""
    ours = is_stdout(path)
    with _refused(path):
        try:
            file = STDOUT_FD if ours else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            with open(file, "wb", closefd=not ours) as opened:
                opened.write(content)
        except BrokenPipeError as error:
            raise ReaderGone(*error.args) from None


def _same_owner_and_mode(temporary: Path, target: Path) -> None:
    """A file that is replaced keeps its mode, and its owner as far as that is allowed."""
    there = _there(target)
    if there is None:
        return
    with suppress(PermissionError):
        os.chown(temporary, there.st_uid, there.st_gid)
    os.chmod(temporary, stat.S_IMODE(there.st_mode))


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """What the system refuses is bad input that names the path."""
    try:
        yield
    except ReaderGone:
        raise
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise BadInput(str(path), found=found, expected="a place that can be written") from None
