"""`python -m peers.controllers`: step controllers of released engines against both of ours, on random files.

One module is loaded out of each wheel, and stubs replace what it imports. Decisions and averages must be equal bit for
bit. Leaves out: the engines around the controllers.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest import mock

from instep.report.result import Result
from instep_optimized.controllers import controller as optimized
from instep_reference.contract.adaptive_controller_file import DEFAULT_FILES, FLAT, RELEASES, AdaptiveFile, Dialect
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.errors import BadInput
from instep_reference.controllers import controller as reference

from .environment import TOP

RESULT = TOP / "fixtures" / "results" / "controllers.json"
RUNS, BATCHES = 400, 150
SGLANG, VLLM = "sglang/srt/speculative/adaptive_spec_params.py", "vllm/v1/spec_decode/dynamic/utils.py"
VLLM_RELEASES = ("0.33.0",)
SIDES: Mapping[str, Callable[..., Any]] = {"reference": reference, "optimized": optimized}
LARGEST_BATCH = 24
# What the modules import. Nothing of it is called by the functions that run here.
STUBS = {
    "sglang.srt.utils": {"log_info_on_rank0": lambda *said: None},
    "sglang.srt.arg_groups.overrides": {"resolved_view": None, "resolving_view": None},
    "sglang.srt.runtime_context": {"attn_dp_enabled_of": None},
    "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": None},
}


@dataclass(frozen=True)
class Case:
    """One random run: what the engine is given, and the numbers that its batches are drawn from."""

    file: dict[str, Any]
    initial: int
    captured: tuple[int, ...]
    lag: int
    seed: int


def loaded(source: str, name: str) -> ModuleType:
    """Run the source of one module, with stubs for its imports."""
    stubs = {name: ModuleType(name) for full in STUBS for name in _above(full)}
    for full, attributes in STUBS.items():
        vars(stubs[full]).update(attributes)
    module = ModuleType(name)
    with mock.patch.dict(sys.modules, {**stubs, name: module}):
        exec(compile(source, name, "exec"), vars(module))
    return module


def _above(full: str) -> list[str]:
    parts = full.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


# -- SGLang --------------------------------------------------------------------------------------


def drawn(seed: int, fewest: int) -> Case:
    """Draw a file with slots, defaults of the whole file, graphs or none, and results in time or a round late."""
    dice = Random(seed)

    def fields(share: float) -> dict[str, Any]:
        every = {
            "ema_alpha": dice.choice((0.1, 0.2, 0.5, 0.9)), "update_interval": dice.randint(1, 5),
            "warmup_batches": dice.randint(0, 4), "up_hysteresis": _hysteresis(dice),
            "down_hysteresis": _hysteresis(dice), "ceiling_coeff": dice.choice((0, 0, 0.7, 1.0, 1.5)),
            "a key that no release reads": 1,
        }  # fmt: skip
        return {name: value for name, value in every.items() if dice.random() < share}

    keys = dice.sample((0, 1, 2, 4, 8, 16), dice.randint(1, 4))
    slots = {str(key): {"candidate_steps": dice.choices(range(fewest, 9), k=dice.randint(1, 4)), **fields(0.4)}
             for key in keys}  # fmt: skip
    counts = sorted({count for slot in slots.values() for count in slot["candidate_steps"]})
    sizes = dice.sample(range(1, LARGEST_BATCH - 4), dice.randint(1, 4)) if dice.random() < 0.6 else ()
    return Case(slots | fields(0.5), dice.choice(counts), tuple(sorted(sizes)), seed % 2, seed)


def _hysteresis(dice: Random) -> float:
    return dice.choice((-0.5, -0.25, 0.0, 0.1, 0.3, round(dice.uniform(-1, 1), 3)))


def slots_differ(module: ModuleType, case: Case, ours: Any) -> bool:
    """Whether a decision or an average differs anywhere in one run. `ours`: a controller of either side."""
    theirs = _made(module, case)
    late, dice = deque[list[int]](), Random(case.seed)
    for _ in range(BATCHES):
        batch = dice.randint(1, LARGEST_BATCH)
        steps = theirs.get_steps_for_batch(batch)
        if ours.next_num_steps(batch, batch) != steps:
            return True
        ours.set_num_steps(steps)
        accepted = [dice.randint(0, steps) for _ in range(batch)]
        ours.forwarded(0 if steps else batch)
        if steps:
            ours.committed(accepted)
        late.append(accepted)
        if len(late) > case.lag:
            arrived = late.popleft()
            theirs.on_verify_complete(arrived, len(arrived))
        if dict(ours.slots) != {key: (slot.current_steps, slot.ema_accept_len) for key, slot in theirs._slots.items()}:
            return True
    return False


def _made(module: ModuleType, case: Case) -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(case.file))
        file.flush()
        theirs = module.AdaptiveSpeculativeParams(case.initial, file.name)
    theirs.set_cuda_graph_bs(list(case.captured) or None)
    return theirs


def ours_of(side: str, dialect: Dialect, case: Case) -> Any:
    return SIDES[side](Controlled(dialect, case.captured, file=case.file), case.initial, None, case.lag)


def without_padding(case: Case) -> Case:
    return replace(case, captured=())


def without_defaults(case: Case) -> Case:
    """Leave out the fields of the whole file."""
    return replace(case, file={key: slot for key, slot in case.file.items() if key.isdigit()})


def without_ceiling(case: Case) -> Case:
    file = {key: value for key, value in case.file.items() if key != "ceiling_coeff"}
    return replace(case, file={key: {name: field for name, field in value.items() if name != "ceiling_coeff"}
                               if isinstance(value, dict) else value for key, value in file.items()})  # fmt: skip


def with_initial(case: Case) -> Case:
    """Insert the initial count into every slot."""
    return replace(case, file={
        key: {**value, "candidate_steps": [*value["candidate_steps"], case.initial]} if isinstance(value, dict)
        else value for key, value in case.file.items()
    })  # fmt: skip


def without_lag(case: Case) -> Case:
    return replace(case, lag=0)


MISTAKES: Mapping[str, Callable[[Case], Case]] = {
    "padding left out": without_padding, "defaults of the file ignored": without_defaults,
    "ceiling ignored": without_ceiling, "initial count inserted": with_initial, "results in time": without_lag,
}


def slots_row(release: str, module: ModuleType, runs: int) -> dict[str, Any]:
    """Compare a release that reads slots. The dialects that agree in every run are found here, not assumed."""
    cases = [drawn(seed, 0 if _reads(module, 0) else 1) for seed in range(runs)]
    positive = [drawn(seed, 1) for seed in range(runs)]
    dialects: tuple[Dialect, ...] = ("sglang-0.5.13", "sglang-0.5.14")
    among = {dialect: sum(slots_differ(module, case, ours_of("reference", dialect, case)) for case in positive)
             for dialect in dialects}  # fmt: skip
    (dialect,) = [one for one, count in among.items() if not count] or ["none"]
    table = module.DEFAULT_ADAPTIVE_CONFIG
    defaults = [name for name, file in DEFAULT_FILES.items() if RELEASES[name][0] == dialect != FLAT
                and AdaptiveFile.of(file, dialect) == AdaptiveFile.of(table, dialect)]  # fmt: skip
    counts = module.resolve_candidate_steps_from_config(None)
    known = dialect if dialect in dialects else "sglang-0.5.14"
    return {
        "package": "sglang", "release": release, "dialect": dialect, "default file of": next(iter(defaults), "none"),
        "expected": list(RELEASES[release]), "runs": runs, "batches": BATCHES,
        "differ": {side: sum(slots_differ(module, case, ours_of(side, known, case)) for case in cases)
                   for side in SIDES},
        "differ from": {one: count for one, count in among.items() if one != dialect},
        "starts alike": all(make(Controlled(known, defaults=release if known == "sglang-0.5.14" else None), None)
                            .initial == counts[len(counts) // 2] for make in SIDES.values()),
        "mistakes": {says: sum(slots_differ(module, case, ours_of("reference", known, wrong(case))) for case in cases)
                     for says, wrong in MISTAKES.items()},
    }  # fmt: skip


def _reads(module: ModuleType, count: int) -> bool:
    try:
        _made(module, Case({"1": {"candidate_steps": [count]}}, count, (), 0, 0))
    except ValueError:
        return False
    return True


def flat_row(release: str, module: ModuleType, runs: int) -> dict[str, Any]:
    """Compare SGLang 0.5.12, where a file is flat and there are no slots."""
    differ = {side: sum(_flat_differs(module, seed, make) for seed in range(runs)) for side, make in SIDES.items()}
    return {"package": "sglang", "release": release, "dialect": FLAT, "default file of": release,
            "expected": list(RELEASES[release]), "runs": runs, "batches": BATCHES, "differ": differ}  # fmt: skip


def _flat_differs(module: ModuleType, seed: int, make: Callable[..., Any]) -> bool:
    dice = Random(seed)
    low, high = sorted((_hysteresis(dice), _hysteresis(dice)))
    file = {"candidate_steps": dice.sample(range(1, 9), dice.randint(2, 4)), "ema_alpha": dice.choice((0.1, 0.2, 0.9)),
            "update_interval": dice.randint(1, 5), "warmup_batches": dice.randint(0, 4), "down_hysteresis": low,
            "up_hysteresis": high}  # fmt: skip
    initial = dice.randint(1, 8)
    theirs = module.AdaptiveSpeculativeParams(initial, file)
    ours = make(None, initial, AdaptiveFile.of(file), 0)
    for _ in range(BATCHES):
        accepted = [dice.randint(0, theirs.current_steps) for _ in range(dice.randint(1, LARGEST_BATCH))]
        ours.forwarded(0)
        ours.committed(accepted)
        theirs.update(accepted)
        if dict(ours.slots) != {1: (theirs.current_steps, theirs.ema_accept_len)}:
            return True
        ours.set_num_steps(theirs.current_steps)
    return False


# -- vLLM ----------------------------------------------------------------------------------------


def table_row(release: str, module: ModuleType, runs: int) -> dict[str, Any]:
    """Compare the table of vLLM at every batch size, and which tables are refused."""
    said = [_table_differs(module, seed) for seed in range(runs)]
    return {
        "package": "vllm", "release": release, "dialect": "vllm-table", "expected": ["vllm-table"], "runs": runs,
        "batches": LARGEST_BATCH, "differ": {side: sum(side in one for one in said) for side in SIDES},
        "refused": sum("refused" in one for one in said), "refused by one": sum("apart" in one for one in said),
    }  # fmt: skip


def _table_differs(module: ModuleType, seed: int) -> set[str]:
    """The sides that differ; `refused` by both, or `apart`: only one refuses the table."""
    dice = Random(seed)
    ends = sorted(dice.sample(range(1, LARGEST_BATCH), 2 * dice.randint(1, 4)))
    starts = [1 if dice.random() < 0.9 else ends[0], *ends[2::2]]
    table = [(first, last, dice.randint(-1 if dice.random() < 0.1 else 0, 8))
             for first, last in zip(starts, ends[1::2], strict=True)]  # fmt: skip
    if dice.random() < 0.1:
        table.append(table[0])
    dice.shuffle(table)
    most = dice.randint(1, 8)
    controlled = Controlled("vllm-table", table=tuple(table), num_speculative_tokens=most)
    try:
        theirs = module.build_dynamic_sd_schedule_lookup(table, LARGEST_BATCH, most)
    except ValueError:
        theirs = None
    try:
        controlled.check(most)
    except BadInput:
        return {"refused"} if theirs is None else {"apart"}
    if theirs is None:
        return {"apart"}
    wishes = {side: [make(controlled, most).next_num_steps(0, batch) for batch in range(1, LARGEST_BATCH + 1)]
              for side, make in SIDES.items()}  # fmt: skip
    return {side for side, found in wishes.items() if found != theirs[1:]}


# -- all of them ---------------------------------------------------------------------------------


def right(row: Mapping[str, Any]) -> bool:
    """Whether a row is as the contract says, and every mistake is seen."""
    named = [row["dialect"], row["default file of"]] if row["package"] == "sglang" else [row["dialect"]]
    seen = all(row.get("mistakes", {"none": 1}).values()) and all(row.get("differ from", {"none": 1}).values())
    return (named == row["expected"] and not any(row["differ"].values()) and seen and row.get("starts alike", True)
            and not row.get("refused by one", 0))  # fmt: skip


def rows(sources: Mapping[tuple[str, str], str], runs: int = RUNS) -> list[dict[str, Any]]:
    """The rows of these modules: (package, release) -> source."""
    found = []
    for (package, release), source in sources.items():
        module = loaded(source, f"{package}_{release}")
        make = table_row if package == "vllm" else flat_row if release == "0.5.12" else slots_row
        found.append(make(release, module, runs))
        found[-1]["right"] = right(found[-1])
        print(f"{'  ' if found[-1]['right'] else '! '}{package} {release}: {found[-1]['dialect']}, "
              f"{found[-1]['differ']} of {runs} runs differ", flush=True)  # fmt: skip
    return found


def source(package: str, release: str, folder: Path) -> str:
    """The source of the controller in a wheel, which is downloaded into the folder if it is not there."""
    wheels = [*folder.glob(f"{package}-{release}-*.whl")]
    if not wheels:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                        "--disable-pip-version-check", "--dest", str(folder), f"{package}=={release}"], check=True)
        wheels = [*folder.glob(f"{package}-{release}-*.whl")]
    with zipfile.ZipFile(wheels[0]) as archive:
        return archive.read(VLLM if package == "vllm" else SGLANG).decode()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.controllers", description="Released step controllers, and ours.")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; what is missing is downloaded there, and kept")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--commit", help="revision of the source, for the result file")
    options = parser.parse_args(given)
    folder = options.wheels or Path(tempfile.mkdtemp())
    try:
        wanted = [*(("sglang", release) for release in RELEASES), *(("vllm", release) for release in VLLM_RELEASES)]
        found = rows({(package, release): source(package, release, folder) for package, release in wanted})
    finally:
        if options.wheels is None:
            shutil.rmtree(folder)
    code = 0 if all(row["right"] for row in found) else 1
    said = ["python -m peers.controllers", *([] if options.commit is None else ["--commit", options.commit])]
    Result(code, "cpu", {"command": " ".join(said), "rows": found}, options.commit).write(options.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
