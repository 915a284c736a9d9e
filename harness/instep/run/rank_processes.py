"""The processes of an engine with a rank in each: this one is rank 0, and the others run the same replay.

Every process serves the whole trace with its own rank, compares the merged rows and states with a reference, and judges
the memory of its own rank. After every event the ranks exchange their findings, so all stop at the same event. Leaves
out: the calls between ranks (`instep_optimized.ranks.processes`).
"""

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from instep_optimized.ranks.lockstep import LIMIT_S
from instep_optimized.ranks.processes import ENDED, HOST, Processes, died
from instep_reference.contract.errors import BadInput

from .subject_errors import raised_of

T = TypeVar("T")
START = {"gloo": "fork", "nccl": "spawn"}  # CUDA does not survive a fork
LEAVES_S = 2.0  # seconds in which a process must end once the run has ended
CONNECTS_S = 60.0  # seconds in which a process must have begun: one that is not forked imports torch first


def over_processes(size: int, backend: str, own: Callable[[Processes], T], others: Callable[[Processes], object]) -> T:
    """Run `own` as rank 0 here and `others` as every other rank in a process of its own; return the result of `own`.

    Processes that are not forked (`START`) need an `others` that can be pickled. All processes have ended when this
    returns or raises.
    """
    if backend == "nccl" and torch.cuda.device_count() < size:
        raise BadInput("--comm", found=f"nccl for {size} ranks and {torch.cuda.device_count()} GPUs",
                       expected="a GPU for each rank")  # fmt: skip
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink, which not every host allows
    context: Any = multiprocessing.get_context(START[backend])
    store, threads = _served(), torch.get_num_threads()
    processes = [context.Process(target=_serve, args=(rank, size, backend, store.port, others), daemon=True)
                 for rank in range(1, size)]  # fmt: skip
    torch.set_num_threads(1)  # a forked process has no other threads, and every rank must compute the same bits
    late: tuple[int, ...] = ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about a fork of a process with threads
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the processes begin with that, too
            try:
                for process in processes:
                    process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        with _watching(processes, store.port):
            group = _group(0, size, backend, store)
            try:
                found = own(group)
            finally:
                group.close()
                late = group.late
    finally:
        torch.set_num_threads(threads)
        forced = [rank for rank in _end(processes) if rank not in late]  # a late rank is reported already
    if forced:
        warnings.warn(f"the process of rank {', '.join(map(str, forced))} had not ended {LEAVES_S:g} s after the run, "
                      "and was killed", RuntimeWarning, stacklevel=2)  # fmt: skip
    return found


def _serve(rank: int, size: int, backend: str, port: int, work: Callable[[Processes], object]) -> None:
    """Run one rank in a new process. It prints nothing: rank 0 reports for all."""
    gc.freeze()  # objects with threads of rank 0 must not be collected here, where these threads are missing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank 0, which ends the others
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)
    store = _connected(port)
    try:
        work(_group(rank, size, backend, store))
        why = ENDED
    except BaseException as error:
        why = f"raised {type(error).__name__} ({error})"
    _post(store, rank, why)
    os._exit(0)  # handles of threads and of gloo that were forked must not be closed twice


def _group(rank: int, size: int, backend: str, store: Any) -> Processes:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    return Processes(rank, size, store, backend, LIMIT_S, raised_of)


def _served() -> Any:
    """A key-value store that only this machine reaches: its values are pickled."""
    listens = socket.create_server((HOST, 0))
    port = listens.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listens.detach())


def _connected(port: int) -> Any:
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECTS_S))


def _post(store: Any, rank: int, why: str, number: int = 0) -> None:
    """Post the end of a rank, if rank 0 is still there to read it. number: of the signal that ended it"""
    try:
        store.set(died(rank), pickle.dumps((why, number)))
    except RuntimeError:
        return


@contextmanager
def _watching(processes: Sequence[Any], port: int) -> Iterator[None]:
    """Post the end of every process that ends, because a killed one cannot."""
    over, store = threading.Event(), _connected(port)  # another connection: that of rank 0 waits

    def watch() -> None:
        left = {process.sentinel: (rank, process) for rank, process in enumerate(processes, start=1)}
        while left and not over.is_set():
            for sentinel in wait([*left], timeout=0.1):
                rank, process = left.pop(sentinel)
                process.join()
                if process.exitcode < 0:
                    number = -process.exitcode
                    _post(store, rank, f"was ended by {signal.Signals(number).name}", number)
                elif process.exitcode:
                    _post(store, rank, "exited")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end(processes: Sequence[Any]) -> list[int]:
    """Wait a moment for the processes, end those that are left, and return their ranks."""
    forced = list[int]()
    for rank, process in enumerate(processes, start=1):
        if process.pid is None:
            continue
        process.join(LEAVES_S)
        if process.is_alive():
            forced.append(rank)
        for end in (process.terminate, process.kill):
            if process.is_alive():
                end()
                process.join(LEAVES_S)
    return forced
