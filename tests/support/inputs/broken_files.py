"""Draw broken files, and read each as instep does: traces, checkpoints, recordings, results, policies and prompts.

    PYTHONPATH=reference:optimized:harness:tests python -m support.inputs.broken_files --count 100000 --seed 1

A reader may return, or raise the project's own error with one line of text. Anything else is printed with its number,
which together with the seed draws the same file again (`--only NUMBER`). Leaves out: commands on such files
(`tests/harness/test_bad_input.py`), and events of a sound trace that are illegal (`test_event_rules.py`).
"""

import argparse
import json
import random
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from instep.audit.audit import audit, opened
from instep.campaign.soak import totals
from instep.generate.decode import Ask, decode
from instep.report import result
from instep.report.html.write_page import page_of_file
from instep.report.result_difference import difference
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.event_rules import verified
from instep.trace.file import CHECKSUMS, read
from instep.trace.policy import read_policy, read_prompts
from instep_proof.faults import result_data
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import InstepError
from instep_reference.weights import Weights
from instep_speed.bench import resume

from .checkpoints import write as write_checkpoint
from .recordings import TINY, recorded
from .traces import seal

TRACES = tuple(Path("fixtures/traces/faults", f"{name}.jsonl") for name in ("pair", "coins", "ragged", "transfer"))
RESULTS = Path("fixtures/results")
LIMIT_S, MEMORY = 30, 16 << 30  # processor time that one file may take; address space of the process
Files = dict[str, bytes]
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "a", "\0",
    "\ud800", "é" * 50, "../..", "/dev/null", [], {}, [[]], {"": {}}, [0] * 100, list(range(5)),
)  # fmt: skip


class Kind(NamedTuple):
    """A kind of file.

    files  sound ones, by their names in a folder
    read   reads them as a command does
    use    uses those that can be read, as a command does; a finding is no failure
    seal   makes the digests of mutated files agree with their content again, if the kind has any
    """

    files: Files
    read: Callable[[Path], object]
    use: Callable[[Path], object] | None = None
    seal: Callable[[Path], object] | None = None


class Hangs(BaseException):
    """A reader did not return in time. As no `Exception`, it passes through every handler of a reader."""


def kinds(folder: Path) -> dict[str, Kind]:
    """All kinds, by name. folder: for those that are made here"""
    found = {}
    for trace in TRACES:
        files = {"t.jsonl": trace.read_bytes(), "t.safetensors": trace.with_suffix(".safetensors").read_bytes()}
        for name, seal_with in (("trace", None), ("sealed-trace", _sealed)):
            found[f"{name}-{trace.stem}"] = Kind(files, lambda at: verified(read(at / "t.jsonl")), _replay, seal_with)
    for name in ("dense", "moe", "kimi"):
        files = _files_of(write_checkpoint(folder / name, name))
        found[f"checkpoint-{name}"] = Kind(files, lambda at: Weights.of(Checkpoint.open(at)), _generate)
    found["recording"] = Kind(_files_of(recorded(folder / "recording", tokens=4)), _read_recording,
                              lambda at: audit(at, TINY))  # fmt: skip
    line = {"prompt": [1, 2, 3], "tokens": [4, 5], "request": "a"}
    found["plain-recording"] = Kind({"p.jsonl": b"".join(json.dumps(line | {"request": name}).encode() + b"\n"
                                                         for name in "abc")}, lambda at: opened(at / "p.jsonl"),
                                    lambda at: audit(at / "p.jsonl", TINY, dtype="float32"))
    for name, reader in {
        "replay-cpu": _read_result, "shapes-native": _read_result, "streams-native": _read_result, "live": result.read,
        "calibration": result.read, "gate-cpu": result.read, "bench-prompts": resume.read_file,
        "faults": result_data.read, "soak": totals.read,
    }.items():
        files = {"r.json": json.dumps(_fewer(json.loads((RESULTS / f"{name}.json").read_bytes()))).encode()}
        found[f"result-{name}"] = Kind(files, lambda at, reader=reader: reader(at / "r.json"),
                                        lambda at: page_of_file(at / "r.json"))
    policy, prompts = TRACES[0].with_suffix(".policy.json"), Path("fixtures/traces/faults/short.prompts.json")
    found["policy"] = Kind({"p.json": policy.read_bytes()}, lambda at: read_policy(at / "p.json"))
    found["prompts"] = Kind({"p.json": prompts.read_bytes()}, lambda at: read_prompts(at / "p.json"))
    adaptive = json.dumps({"candidate_steps": [1, 3], "warmup_batches": 1, "update_interval": 1}).encode()
    found["adaptive"] = Kind({"a.json": adaptive}, lambda at: AdaptiveFile.read((at / "a.json").read_bytes()))
    return found


def _files_of(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def _fewer(value: Any) -> Any:
    """A result with at most two entries in each list, and small enough to be mutated quickly."""
    if isinstance(value, dict):
        return {name: _fewer(inner) for name, inner in value.items()}
    return [_fewer(inner) for inner in value[:2]] if isinstance(value, list) else value


def _sealed(at: Path) -> None:
    lines, tensors = (at / "t.jsonl").read_bytes().splitlines()[:-1], load_file(at / "t.safetensors")
    header = json.loads(lines[0])
    if isinstance(header, dict):
        header.pop("tensors_sha256", None)
    tensors.pop(CHECKSUMS, None)
    seal(at / "t.jsonl", [json.dumps(header).encode(), *lines[1:]], tensors)


def _read_recording(at: Path) -> None:
    found = opened(at)
    for number, _ in enumerate(found.events):
        found.tensors(number)


def _replay(at: Path) -> None:
    """With labels, which need no arithmetic."""
    Replay(read(at / "t.jsonl"), Setting(ops="ledger"), checkpoint=TINY).run()


def _generate(at: Path) -> None:
    """Two tokens, judged."""
    decode(Ask(Checkpoint.open(at), Setting(), {"a": (1, 2)}, 1, tokens=2))


def _read_result(file: Path) -> None:
    """As `instep diff` does, with itself."""
    found = result.read(file)
    difference(found, found, ("before", "after"))


# Mutations

def mutated(kind: Kind, draw: random.Random) -> Files:
    """The files with one to three mutations in one of them."""
    files = dict(kind.files)
    name = draw.choice(list(files))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        files[name] = _mutated(files[name], name, draw, sealed=kind.seal is not None)
    return files


def _mutated(content: bytes, name: str, draw: random.Random, *, sealed: bool) -> bytes:
    if name.endswith(".safetensors"):
        return _other_header(content, draw) if draw.random() < 0.6 else _other_bytes(content, draw)
    if draw.random() < (0.1 if sealed else 0.25):
        return _other_bytes(content, draw)
    try:
        if not name.endswith(".jsonl"):
            return _dumped(_other_value(json.loads(content), draw))
        lines = content.splitlines(keepends=True)
        at = draw.randrange(len(lines))
        match draw.randrange(8):
            case 0:
                lines.insert(draw.randrange(len(lines)), lines[at])
            case 1:
                del lines[at]
            case 2:
                to = draw.randrange(len(lines))
                lines[at], lines[to] = lines[to], lines[at]
            case _:
                lines[at] = _dumped(_other_value(json.loads(lines[at]), draw)) + b"\n"
        return b"".join(lines)
    except (ValueError, RecursionError):
        return _other_bytes(content, draw)  # an earlier mutation left no JSON


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    found, todo = list[tuple[Any, Any]](), [value]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        todo += [one[key] for key in keys]
    return found


def _other_value(value: Any, draw: random.Random) -> Any:
    """A JSON value with one part replaced, deleted, added, moved or nested."""
    places = _places(value)
    if not places or draw.random() < 0.02:
        return draw.choice(VALUES)
    inside, key = draw.choice(places)
    match draw.randrange(8):
        case 0:
            del inside[key]
        case 1:
            if isinstance(inside, dict):
                inside[draw.choice(("", "x", str(key) + "_", "schema"))] = draw.choice(VALUES)
            else:
                inside.insert(key, draw.choice(VALUES))
        case 2:
            other, where = draw.choice(places)
            inside[key] = json.loads(json.dumps(other[where]))
        case 3 if isinstance(inside[key], int | float):
            number = inside[key]
            inside[key] = draw.choice((number + 1, number - 1, -number, number * 1000, str(number)))
        case 4 if isinstance(inside[key], str):
            inside[key] = draw.choice((inside[key] + "x", inside[key][:-1], inside[key].upper(), [inside[key]]))
        case 5:
            inside[key] = json.loads("[" * 400 + "]" * 400) if draw.random() < 0.2 else [inside[key]]
        case _:
            inside[key] = draw.choice(VALUES)
    return value


def _other_bytes(content: bytes, draw: random.Random) -> bytes:
    at, size = draw.randrange(len(content) + 1), draw.choice((1, 1, 2, 8, 100, 5000))
    match draw.randrange(7):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + size :]
        case 2:
            return content[:at] + draw.randbytes(size) + content[at + size :]
        case 3:
            return content[:at] + content[max(at - size, 0) : at] + content[at:]
        case 4:
            return content[:at] + bytes(size) + content[at + size :]
        case 5:
            return content[:at] + draw.choice((b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xff\xfe", b"\r\n\n"))
        case _:
            flipped = [byte ^ 1 << draw.randrange(8) for byte in content[at : at + 1]]
            return content[:at] + bytes(flipped) + content[at + 1 :]


def _other_header(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file with a mutated header, whose length field is right."""
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + size])
        names = [name for name in header if name != "__metadata__"]
        one = header[draw.choice(names)]
        match draw.randrange(5):
            case 0:
                one["dtype"] = draw.choice(("F32", "F64", "I64", "U8", "BF16", "F8_E4M3", "BOOL", "X"))
            case 1:
                shape = one["shape"]
                one["shape"] = draw.choice((shape[::-1], [*shape, 1], shape[1:], [2**40, 2**40], []))
            case 2:
                name = draw.choice(names)
                header[draw.choice((name + "x", name.upper(), name.replace(".0.", ".1."), "model"))] = header.pop(name)
            case 3:
                del header[draw.choice(names)]
            case _:
                header = _other_value(header, draw)
        text = json.dumps(header).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _other_bytes(content, draw)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


# Trials

class Trial(NamedTuple):
    """The result of one file. outcome: "read", "used", "refused", or the way in which the reader failed"""

    number: int
    kind: str
    outcome: str
    says: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome not in ("read", "used", "refused")


def trials(
    seed: int, numbers: Iterable[int], known: Mapping[str, Kind], at: Path, use: float
) -> Iterator[Trial]:
    """Draw and read one file for each number.

    at: a folder that each makes and removes;  use: the probability that a file which can be read is also used
    """
    for number in numbers:
        draw = random.Random(f"{seed}/{number}")
        name = draw.choice(list(known))
        yield trial(number, name, known[name], mutated(known[name], draw), at, used=draw.random() < use)


def trial(number: int, name: str, kind: Kind, files: Files, at: Path, *, used: bool) -> Trial:
    """Read the files in a folder that is made for them."""
    for file, content in files.items():
        (at / file).parent.mkdir(parents=True, exist_ok=True)
        (at / file).write_bytes(content)
    try:
        return Trial(number, name, *_outcome(kind, at, used=used))
    finally:
        shutil.rmtree(at)


def _outcome(kind: Kind, at: Path, *, used: bool) -> tuple[str, str]:
    if kind.seal is not None:
        with suppress(Exception):  # what is too broken to be sealed is read as it is
            kind.seal(at)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, 10 * LIMIT_S)  # for a reader that waits
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kind.read(at)
            if kind.use is None or not used:
                return "read", ""
            kind.use(at)
            return "used", ""
    except InstepError as error:
        lines = str(error).splitlines()
        return ("refused", "") if len(lines) == 1 else ("more than one line", str(error)[:300])
    except Hangs:
        return "hangs", ""
    except Exception as error:
        return type(error).__name__, _where(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _where(error: BaseException) -> str:
    """The innermost lines of the project, and the message."""
    lines = [f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in extract_tb(error.__traceback__)
             if "/instep" in at.filename]  # fmt: skip
    return f"{' > '.join(lines[-3:])}: {str(error)[:200]}"


def _hang(*_: object) -> None:
    raise Hangs


@contextmanager
def limited() -> Iterator[None]:
    """Limit the time of each file, and the memory of this process."""
    before = {number: signal.signal(number, _hang) for number in (signal.SIGALRM, signal.SIGPROF)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in before.items():
            signal.signal(number, handler)


def report(found: Iterable[Trial]) -> Iterator[str]:
    """Lines about all trials, the failed ones last."""
    counted, failed = Counter[tuple[str, str]](), dict[str, list[Trial]]()
    for one in found:
        counted[one.kind, "failed" if one.failed else one.outcome] += 1
        if one.failed:
            failed.setdefault(f"{one.kind}: {one.outcome} {one.says}", []).append(one)
    for kind in sorted({kind for kind, _ in counted}):
        yield f"{kind}: " + ", ".join(f"{counted[kind, one]} {one}" for one in ("refused", "read", "used", "failed"))
    for says, those in failed.items():
        yield f"FAILED {len(those)}, first number {those[0].number}: {says}"
    yield f"{counted.total()} files, {sum(map(len, failed.values()))} failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one file")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("N", "OF"), help="one part of the files")
    parser.add_argument("--use", type=float, default=0.05, help="the part of the readable files that is also used")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    numbers = range(given.part[0], given.count, given.part[1]) if given.only is None else [given.only]
    with tempfile.TemporaryDirectory() as folder, limited():
        *lines, last = report(trials(given.seed, numbers, kinds(Path(folder, "made")), Path(folder, "file"), given.use))
    print(*lines, f"{last}, seed {given.seed}, {time.monotonic() - begun:.0f} s", sep="\n")
    raise SystemExit(" 0 failed" not in last)


if __name__ == "__main__":
    main()
