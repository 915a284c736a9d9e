"""The options of a campaign over several machines, `--farm`, `--jobs` and `--executor`, as one parameter of a command.

Leaves out: claims and results (`instep.campaign.farm`), the trials of a command, and their merge.
"""

import math
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

from instep_reference.contract.errors import BadInput

from .progress import trial_runner
from .subject_options import Given, annotated, with_parameters

PANEL = "Several machines"
# Options of a worker. They change no trial, so that workers may differ in them.
OF_A_WORKER = ("farm", "executor", "jobs", "json", "html", "picture", "minutes", "seconds", "out")
CONNECT_S = 20
MOST_SHOWN = 20  # missing trials that are listed


@dataclass(frozen=True)
class Served:
    """The end of a worker.

    paths     the results of all workers
    complete  whether no trial is missing
    machines  the machines of the trials, each with its number of trials, for the result file
    """

    paths: Sequence[Path]
    complete: bool
    machines: Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Farming:
    """The typed options. context: the command line, from which those of the trials are made."""

    context: typer.Context
    farm: Path | None = None
    executor: str | None = None
    jobs: int | None = None

    def serve(
        self, trials: Callable[[], Iterable[Mapping[str, Any]]], *, varied: Collection[str], total: int | None,
        fixed: Mapping[str, Any] = MappingProxyType({}), minutes: float | None = None, until_found: bool = False,
    ) -> Served:
        """Work in the farm until no trial is left or the time is over, and report what is missing.

        trials   the values of parameters that each trial has; the other words are as typed
        varied   parameters that trials set, or that only choose the trials;  fixed: values that all trials have
        """
        from ..campaign.farm import NOT_CLAIMED, Farm, source_of
        from ..report.machine import installed
        from ..report.result import read

        assert self.farm is not None
        base = [self.context.info_name or "", *self._words({*varied, *fixed}), *self._rendered(fixed)]
        record = {"command": " ".join(base), "source": source_of(()), "version": installed("instep")}
        out = any(each.name == "out" for each in self.context.command.params)
        farm = Farm(self.farm, record, lambda: ((*base, *self._rendered(one)) for one in trials()), total,
                    out, until_found)  # fmt: skip
        farm.open()
        interrupted = False
        if self.jobs != 0:
            with self._executor() as (executor, jobs), trial_runner("farm", minutes) as run, _terminated():
                farm.work(run, executor, jobs)
            interrupted = run.interrupted
        left, paths = farm.left(), farm.results()
        of = "" if total is None else f" of {total}"
        shown = sorted(left, key=lambda line: line.endswith(NOT_CLAIMED))[:MOST_SHOWN]
        shown += [f"{len(left) - MOST_SHOWN} more are missing"] * (len(left) > MOST_SHOWN)
        print(f"farm {self.farm}: {len(paths)}{of} trials are there", *shown, sep="\n  ")
        if not paths:
            raise typer.Exit(3)
        ran = [read(path)["machine"] for path in paths]
        several = [one for number, one in enumerate(ran) if one not in ran[:number]]
        return Served(paths, not (left or interrupted), [{"trials": ran.count(one), **one} for one in several])

    def serve_seeds(
        self, given: Given, length: str, sum_of_all: int | None, longest: int, seed: int, minutes: float | None,
    ) -> Served:
        """Serve trials of one op set and one seed each, all equally long, until a divergence is found.

        length      the parameter with the length of a trial, such as its number of runs; longest: its largest value
        sum_of_all  the length per op set, in whole trials; None: trials begin until the time is over
        """
        subjects = given.subjects("ledger", "plain")
        each = longest if sum_of_all is None else min(sum_of_all, longest)
        numbers = None if sum_of_all is None else math.ceil(sum_of_all / each)

        def trials() -> Iterator[dict[str, Any]]:
            for number in count() if numbers is None else range(numbers):
                for name in subjects:
                    yield {**({} if "engine" in given.named else {"ops": [name]}), "seed": seed + number}

        total = None if numbers is None else numbers * len(subjects)
        return self.serve(trials, varied=("ops", "seed"), fixed={length: each}, total=total, minutes=minutes,
                          until_found=True)  # fmt: skip

    def _words(self, varied: Collection[str]) -> Iterator[str]:
        """The typed words that all trials share."""
        for each in self.context.command.params:
            source = self.context.get_parameter_source(each.name or "")
            typed = source is not None and source.name == "COMMANDLINE"
            if typed and each.name not in OF_A_WORKER and each.name not in varied:
                yield from self._rendered({str(each.name): self.context.params[str(each.name)]})

    def _rendered(self, values: Mapping[str, Any]) -> Iterator[str]:
        """The words that set these parameters."""
        parameters = {each.name: each for each in self.context.command.params}
        for name, value in values.items():
            each = parameters[name]
            if isinstance(value, bool):
                yield (each.opts if value else each.secondary_opts)[0]
                continue
            for one in value if isinstance(value, list | tuple) else [value]:
                yield from (() if each.param_type_name == "argument" else each.opts[:1])
                yield str(one)

    @contextmanager
    def _executor(self) -> Iterator[tuple[Executor, int]]:
        """The executor of trials, and how many it runs at once."""
        if self.executor is None:
            jobs = self.jobs or 1
            with ThreadPoolExecutor(jobs) as pool:
                yield pool, jobs
            return
        try:
            distributed: Any = import_module("distributed")
        except ImportError:
            raise BadInput("--executor", found="no package distributed", expected="Dask",
                           hint="`pip install 'instep[dask]'`") from None  # fmt: skip
        try:
            client = distributed.Client(self.executor, timeout=CONNECT_S)
        except (OSError, ValueError) as error:
            raise BadInput("--executor", found=f"{self.executor}: {error}",
                           expected="the address of a Dask scheduler, as tcp://host:8786") from None  # fmt: skip
        with client, client.get_executor(pure=False) as pool:
            yield pool, self.jobs or sum(client.nthreads().values()) or 1


@contextmanager
def _terminated() -> Iterator[None]:
    """Let SIGTERM, with which schedulers end a job, do what Ctrl-C does: the worker gives its claims back."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def takes_farm(*, jobs: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options; its parameter `farm` receives them. jobs: False if it has its own `--jobs`"""
    options = {
        "farm": (Path, typer.Option(metavar="DIR", rich_help_panel=PANEL, show_default=False, help=(
            "Share the trials with all processes that name this folder; the last one has the whole result."))),
        "executor": (str, typer.Option(metavar="ADDRESS", rich_help_panel=PANEL, show_default=False, help=(
            "Run the trials of --farm on the workers of this Dask scheduler."))),
        "jobs": (int, typer.Option(rich_help_panel=PANEL, show_default=False, min=0, help=(
            "Trials of --farm at once; 0: run none, merge the results. Default: 1, or as many as Dask has threads."))),
    }  # fmt: skip
    added = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    added += [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotated(kind, how))
              for name, (kind, how) in options.items() if jobs or name != "jobs"]  # fmt: skip

    def made(typed: Mapping[str, Any]) -> Farming:
        for name, value in typed.items():
            if name in ("executor", "jobs") and value is not None and typed["farm"] is None:
                raise BadInput(f"--{name}", found="no --farm", expected="the folder that the workers share")
        return Farming(**typed)

    return with_parameters("farm", added, made)
