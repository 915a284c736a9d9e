"""Host reads of the device during an event: on a CPU through a trap for such calls, on a GPU through torch's warnings.

Leaves out: which reads are correct (`checks/host_reads.py`). On a GPU an explicit wait for an event is not seen,
because torch's debug mode does not report it.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .event_log import HostRead

# Calls that give the host a value, or whose result's shape depends on one: on a GPU each of them waits.
READS = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal",
    "is_nonzero", "allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "cpu",
}
MASKED = {"__getitem__", "__setitem__"}  # by a mask of bools: the number of rows is a value
OURS = ("instep.watch", "instep.oracle", "torch", "contextlib", "warnings")  # frames between a read and its reader
INTERPRETER = "triton"  # it replaces the device: its reads are no host reads
PROTOTYPE = "Synchronization debug mode"  # start of torch's message about the mode itself, whenever it is set
CAPTURE = "torch.cuda."  # a graph capture waits first: once for each
WARN, OFF = 1, 0  # of torch.cuda.set_sync_debug_mode


class _Caught(NamedTuple):
    """A warning; armed: whether a wait counts as a host read there;  by: its thread."""

    message: Warning | str
    category: type[Warning]
    filename: str
    line: int
    armed: bool
    by: int


class Reads:
    """Armed while a `with` lasts, except inside `paused`; `inside` names the op at work."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._trap = _Trap(self)
        self._stack = ExitStack()
        self.found: list[HostRead] = []
        self._by: list[int] = []  # the thread of each
        self._armed, self._op = False, ""

    def __enter__(self) -> None:
        self.found, self._armed, self._op, self._by = [], True, "", []
        self._stack = ExitStack()
        if self.cuda:
            caught: list[_Caught] = []
            self._stack.callback(self._sort, caught)  # after the filters are restored
            self._stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            # The mode stays set where reads are allowed: torch warns about the mode itself whenever it is set.
            warnings.showwarning = lambda message, category, filename, line, *more: (
                caught.append(_Caught(message, category, filename, line, self._armed, get_ident())))  # fmt: skip
            torch.cuda.set_sync_debug_mode(WARN)
            self._stack.callback(torch.cuda.set_sync_debug_mode, OFF)
        else:
            self._stack.enter_context(self._trap)

    def __exit__(self, *failed: object) -> None:
        self._armed = False
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside: for the harness's own judging, and for ops that may read."""
        before = self._set(False)
        try:
            with torch._C.DisableTorchFunction():  # an op makes hundreds of calls that need no look
                yield
        finally:
            self._set(before)

    @contextmanager
    def inside(self, op: str) -> Iterator[None]:
        """Reads inside are attributed to this op."""
        before, self._op = self._op, op
        try:
            yield
        finally:
            self._op = before

    def note(self) -> None:
        if self._armed and (reader := _reader(sys._getframe(2))):
            self.found.append(HostRead(reader, self._op))
            self._by.append(get_ident())

    def of_one_thread(self) -> list[HostRead]:
        """The reads of the thread with the most of them: every rank of an engine has a thread, and reads for itself."""
        threads = dict.fromkeys(self._by)
        return max(([read for read, by in zip(self.found, self._by, strict=True) if by == one] for one in threads),
                   key=len, default=[])  # fmt: skip

    def _set(self, armed: bool) -> bool:
        before, self._armed = self._armed, armed
        return before

    def _sort(self, caught: list[_Caught]) -> None:
        """Turn warnings about a wait into host reads, unless reading was allowed there; issue the others again."""
        modules: dict[str, str] = {}  # by file, because there are thousands of modules
        for warning in caught:
            if PROTOTYPE in str(warning.message):
                continue
            if "synchronizing CUDA operation" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.line)
                continue
            if not warning.armed:
                continue
            if warning.filename not in modules:
                modules[warning.filename] = _module(warning.filename)
            if not (module := modules[warning.filename]).startswith(CAPTURE):
                self.found.append(HostRead(f"{module} line {warning.line}", ""))
                self._by.append(warning.by)


class _Trap(TorchFunctionMode):
    """Passes everything on, and records reads."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or (name in MASKED and _masked(args[1])):
            self._reads.note()
        return func(*args, **(kwargs or {}))


def _masked(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


def _reader(frame: FrameType | None) -> str | None:
    """The innermost function that is neither torch's nor instep's; None: the interpreter of kernels."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == INTERPRETER:
            return None
        if not module.startswith(OURS):
            return f"{module}.{frame.f_code.co_qualname} line {frame.f_lineno}"
        frame = frame.f_back
    return None


def _module(filename: str) -> str:
    """The module of a file, by its import name."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == filename:
            return name
    return filename
