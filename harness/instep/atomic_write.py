"""Write a command's files: a regular file is written whole or not at all, anything else is opened and written to.

Leaves out: the contents, and whether an existing file may be replaced (`trace/file.py` decides that).

    -                       stdout; the command's other output then goes to stderr (`cli/exit_process.py`)
    a symbolic link         is followed: its target is replaced, the link stays
    device, pipe, terminal  is opened and written to, and stays what it is
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from instep_reference.contract.errors import BadInput

STDOUT = Path("-")
STDOUT_FD = 1
NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
# Names of open files. Replacing the target of such a name would take it from the process that has it open.
OPEN_FILES = ("/dev/fd/", "/dev/stderr", "/proc/")


class ReaderGone(BrokenPipeError):
    """The reader of the pipe that a file's content is written to has gone."""


def write_atomically(files: Mapping[Path, bytes]) -> None:
    """Write all files. Regular files are replaced in one step each, after all contents are on the disk.

    Devices and pipes are written first, so that no file is replaced if that fails.
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
                # In the target's folder, because a move is atomic only within one file system.
                aside = stack.enter_context(tempfile.TemporaryDirectory(dir=target.parent, prefix=".whole-"))
                temporary = Path(aside, "content")
                temporary.write_bytes(files[path])
                if target.exists():
                    shutil.copymode(target, temporary)
                written.append((temporary, target))
        for temporary, target in written:
            with _refused(target):
                os.replace(temporary, target)


def writable(path: Path, *others: Path | None) -> None:
    """Refuse a path that cannot be written. Called before the work starts, and again before writing.

    others: other files that the command reads or writes; for a trace, its tensor file is included
    """
    with _refused(path):  # for example a link to itself, or a name that is too long
        for other in filter(None, others):
            for taken in (other, other.parent / f"{other.name.removesuffix('.jsonl')}.safetensors"):
                if _same(path, taken):
                    raise BadInput(str(path), found="a file that this command also uses for something else",
                                   expected="another file")  # fmt: skip
        if is_stdout(path):
            return
        if path.is_dir():
            raise BadInput(str(path), found="a folder", expected="the name of a file")
        if _there(path) is not None and not os.access(path, os.W_OK):
            raise BadInput(str(path), found="a file that must not be written", expected="one that may be written")
        folder = Path(os.path.realpath(path) if path.is_symlink() else path).parent
        if is_replaced(path) and not (folder.is_dir() and os.access(folder, os.W_OK)):
            found = "a folder that cannot be written" if folder.is_dir() else "no such folder"
            raise BadInput(str(folder), found=found, expected="a folder that can be written")


def folder_for(path: Path, field: str) -> None:
    """Make a folder for files, or refuse its path."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(field, found=f"{path}: {error.strerror}", expected="a folder that can be made") from None


def _there(path: Path) -> os.stat_result | None:
    """The status of the path's target, following links; None if it does not exist."""
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
    """Whether writing replaces the path: it is a regular file or does not exist, and is no name of an open file."""
    if is_stdout(path) or os.path.abspath(path).startswith(OPEN_FILES):
        return False
    there = _there(path)
    return there is None or stat.S_ISREG(there.st_mode)


def _write_into(path: Path, content: bytes) -> None:
    """Open and write. This bypasses the buffer of `sys.stdout`, so nothing is left in it if the write fails."""
    ours = is_stdout(path)
    with _refused(path):
        try:
            file = STDOUT_FD if ours else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            with open(file, "wb", closefd=not ours) as opened:
                opened.write(content)
        except BrokenPipeError as error:
            raise ReaderGone(*error.args) from None


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn an OSError into a BadInput that names the path."""
    try:
        yield
    except ReaderGone:
        raise
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise BadInput(str(path), found=found, expected="a place that can be written") from None
