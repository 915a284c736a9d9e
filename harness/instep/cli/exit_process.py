"""End a command's process: the exit code, the line on stderr, and the case that the reader of stdout has gone.

Exit codes are those of `verdict.Exit`; typer's own never replace a verdict. Leaves out: the commands.
"""

import errno
import os
import select
import signal
import stat
import sys
import traceback
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

from typer.core import TyperCommand

VERDICTS = (0, 1, 3)
DIVERGED, BAD_INPUT, HARNESS_FAILED = 1, 2, 4
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KILLED_BY_SIGPIPE = 141  # as a shell counts: 128 and the signal's number


class Command(TyperCommand):
    """A command of the table.

    If one of its files is stdout, everything else goes to stderr, including prints of a user's engine.
    """

    def invoke(self, ctx: Any) -> Any:
        from ..atomic_write import is_stdout

        if not any(isinstance(value, str | Path) and is_stdout(Path(value)) for value in ctx.params.values()):
            return self._invoked(ctx)
        with redirect_stdout(sys.stderr):
            return self._invoked(ctx)

    def _invoked(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (OSError, EOFError, SystemExit) as error:
            # typer ends with 1, which says "divergence", for a broken pipe and an end of file. A SystemExit in here is
            # rich's answer to a broken pipe, or comes from a module that was loaded.
            raise Raised(error) from error


class Raised(Exception):
    """Carries an exception past typer."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Outputs:
    """Stdout and stderr as the process got them. rich replaces a broken stdout by another file."""

    def __init__(self) -> None:
        self._kept: list[int] = []
        for number in (1, 2):
            with suppress(OSError):  # closed from the start
                self._kept.append(os.dup(number))

    def close(self) -> None:
        for number in self._kept:
            os.close(number)

    def reader_gone(self) -> bool:
        """Whether one of them is a pipe whose reader has gone."""
        pipes = [number for number in self._kept if stat.S_ISFIFO(os.fstat(number).st_mode)]
        watched = select.poll()
        for number in pipes:
            watched.register(number, select.POLLERR)
        return any(happened & select.POLLERR for _, happened in watched.poll(0))


def leave(outputs: Outputs, code: int, error: BaseException | None) -> NoReturn:
    """End the process. error: the exception of the command, None if it finished."""
    from instep_reference.contract.errors import BadInput

    from ..atomic_write import ReaderGone

    refused = _flushed()
    gone = outputs.reader_gone()
    outputs.close()
    broken = isinstance(error, ReaderGone) or (gone and _is_broken_pipe(error or refused))
    if broken or (gone and error is None and code in VERDICTS):
        _die_of_sigpipe()
    if refused is None and isinstance(error, OSError) and error.errno in FULL:
        refused = error
    if refused is not None:
        error = BadInput("output", found=refused.strerror, expected="a place that can be written")
    if error is not None:
        code = report(error)
    sys.exit(code)


def report(error: BaseException) -> int:
    """Print one line on stderr, after the traceback if it was requested; return the exit code."""
    from instep_reference.contract.errors import InstepError

    guard = sys.modules.get("instep.subject.guarded_calls")  # not loaded: then no subject was called yet
    if guard is not None and isinstance(error, guard.SubjectFailed):
        return _subject_failed(error)
    said, asked = " ".join(str(error).split()), bool(os.environ.get("INSTEP_TRACEBACK"))
    if asked:
        traceback.print_exception(error)
    if isinstance(error, InstepError):
        print(f"instep: {said}", file=sys.stderr)
        return BAD_INPUT
    hint = "" if asked else "; INSTEP_TRACEBACK=1 shows where"
    print(f"instep: the harness itself failed: {type(error).__name__}: {said}{hint}", file=sys.stderr)
    return HARNESS_FAILED


def _subject_failed(error: Any) -> int:
    """The engine under test raised outside any event: still its finding."""
    from ..report.divergence_message import trace
    from ..run.subject_errors import failure

    found = failure(0, "", error)
    print("\n  ".join([f"DIVERGED  {found.diagnosis}", *trace(found.raised)]), flush=True)
    return DIVERGED


def _flushed() -> OSError | None:
    """Flush the buffers; return the system's error. Python itself would end with another exit code."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return error
    return None


def _is_broken_pipe(error: BaseException | None) -> bool:
    """Whether it is a broken pipe, or was raised while one was handled: rich raises SystemExit then."""
    while error is not None:
        if isinstance(error, BrokenPipeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _die_of_sigpipe() -> NoReturn:
    """Die like every other program whose reader has gone."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    sys.exit(KILLED_BY_SIGPIPE)  # the signal is blocked
