"""`python -m peers.live.cost`: measure how much throughput a recording costs, in one packed SGLang on one GPU.

A model in the shape of Qwen3.5-4B with dummy weights serves eight requests at once, with MTP speculation of 3 steps,
simulated acceptance and overlap. A plugin of the scheduler chooses the recorder's variant before each repetition, so
all variants run in one process, by turns. A repetition counts only if its recording is right.
Leaves out: judging the recordings, since dummy weights compute no model.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from . import TOP, cases
from .run import environment, unpacked

RELEASE = "0.5.13"
SHAPE, BATCH, PROMPT, STEPS = "qwen3.5-4b", 8, 32, 3
ACCEPTED = 3  # tokens of each window: two drafts and the bonus. The engine simulates it
TEXT_TOKENS = range(1000, 20000)  # token numbers of prompts, none of them special
BARE, OFF, TOKENS, DEFAULT = "bare", "off", "tokens", "default"
# Options of the recorder in each variant. Bare: the engine's own functions, as without a plugin.
VARIANTS: Mapping[str, dict[str, Any]] = {
    BARE: {}, OFF: {}, TOKENS: {"triggers": (), "every": 0}, DEFAULT: {},
}  # fmt: skip
LIMITS = {OFF: 0.02, TOKENS: 0.05, DEFAULT: 0.25}  # of the throughput of `bare`
ENGINE = "--engine"  # the option of the process that is measured
FOLDER = "PEERS_COST_FOLDER"  # the environment variable with the folder of the recordings
SCHEDULER = "sglang.srt.managers.scheduler"
REQUEST = f"{SCHEDULER}.Scheduler.handle_generate_request"
SAMPLE = "sglang.srt.speculative.eagle_info_v2.EagleVerifyInputV2Mixin.sample"
RESULT, PAGE = "fixtures/results/live-cost.json", "docs/live-results.md"
SAYS = {BARE: "none", OFF: "hooks loaded, recorder off", TOKENS: "tokens only", DEFAULT: "default selection"}
FULL = 0.9  # part of the rows that must have a request, so that the batch is the stated one
SETTLED = 0.3  # seconds in which the scheduler processes its last batch
# What config.json of the published model has and a shape of this repository lacks, because only SGLang reads it.
ONLY_SGLANG = {
    "dtype": "bfloat16", "max_position_embeddings": 262144, "attention_dropout": 0.0, "bos_token_id": None,
    "initializer_range": 0.02, "partial_rotary_factor": 0.25, "use_cache": True,
}  # fmt: skip
MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}


class NotRight(Exception):
    """A repetition whose recording is not what the engine served."""


@dataclass(frozen=True)
class Repetition:
    """One served batch. answers: request -> its tokens and the number of its windows; events, bytes: recorded."""

    variant: str
    seconds: float
    answers: Mapping[str, tuple[list[int], int]]
    events: int = 0
    written: int = 0
    size: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(len(tokens) for tokens, _ in self.answers.values()) / self.seconds


# -- in the scheduler's process ---------------------------------------------------------------------


def load() -> None:
    """Register the recorder's hooks, and those of this measurement. SGLang calls this in every process."""
    if SCHEDULER not in sys.modules or FOLDER not in os.environ:
        return
    from instep.attach import Options
    from instep.attach.releases import resolved
    from instep.attach.sglang import SglangRecorder, register
    from instep.attach.sglang_names import REGISTRY, names_of

    release = resolved("sglang:__version__")
    recorder = SglangRecorder(Options("unused"), release, *names_of(release))
    switch = Switch(recorder, Path(os.environ[FOLDER]))
    register(recorder)
    registry, around = resolved(f"{REGISTRY}:HookRegistry"), resolved(f"{REGISTRY}:HookType").AROUND
    registry.register(REQUEST, switch.request, around)
    registry.register(SAMPLE, accept_drafts, around)


class Switch:
    """Turns the recorder to the variant that the name of a request names: "tokens-3-0" is of the variant tokens.

    Off: the hooks are there, and the recorder has stopped. Bare: the functions are those from before the hooks.
    """

    def __init__(self, recorder: Any, folder: Path) -> None:
        self.recorder, self.folder, self.now = recorder, folder, ""
        self.places = {name: _place(target) for name, target in recorder.names.hooks.items()}
        self.bare = self.functions()
        self.hooked: dict[str, Any] = {}

    def request(self, original: Any, scheduler: Any, received: Any, *given: Any, **named: Any) -> Any:
        """Hook of a function that the scheduler calls once for each request."""
        label = received.rid.rpartition("-")[0]
        if label != self.now:
            self.now = label
            self.turn(label)
        return original(scheduler, received, *given, **named)

    def functions(self) -> dict[str, Any]:
        """The functions that the engine has now."""
        return {name: getattr(owner, last) for name, (owner, last) in self.places.items()}

    def turn(self, label: str) -> None:
        """Record into the folder `label` from now on, as its variant says."""
        variant = label.partition("-")[0]
        self.hooked = self.hooked or self.functions()
        chosen, others = (self.bare, self.hooked) if variant == BARE else (self.hooked, self.bare)
        for name, (owner, last) in self.places.items():
            setattr(owner, last, chosen[name])
            modules = [] if isinstance(owner, type) else list(sys.modules.values())
            for module in modules:  # `from module import function` has its own reference
                if getattr(module, "__dict__", {}).get(last) is others[name]:
                    setattr(module, last, chosen[name])
        old = self.recorder
        options = type(old.options)(str(self.folder / label), **VARIANTS[variant])
        fresh = type(old)(options, old.release, old.names, old.nearest)
        fresh.missing, fresh.stopped = old.missing, "off" if variant == OFF else ""
        vars(old).update(vars(fresh))  # the hooks are methods of the old one


def _place(target: str) -> tuple[Any, str]:
    """The class or module of `module:Class.function`, and the function's name."""
    module, _, path = target.partition(":")
    owner: Any = import_module(module)
    *most, last = path.split(".")
    for part in most:
        owner = getattr(owner, part)
    return owner, last


def accept_drafts(original: Any, window: Any, *given: Any, **named: Any) -> Any:
    """Hook of the acceptance: with simulated acceptance SGLang accepts a token 100, and here it accepts the drafts."""
    predicted, lengths, index = original(window, *given, **named)
    width = window.draft_token_num
    predicted.view(-1, width)[:, :-1] = window.draft_token.view(-1, width)[:, 1:]
    return predicted, lengths, index


# -- in the engine's own process --------------------------------------------------------------------


def model_config() -> bytes:
    """The config.json of the shape, as SGLang loads it."""
    from instep.campaign import shapes
    from instep.cli.fixtures import Engine, config_for

    text = json.loads((shapes.FOLDER / f"{SHAPE}.json").read_text())
    text |= {**ONLY_SGLANG, "rope_parameters": text["rope_parameters"] | MROPE}
    return config_for(Engine.SGLANG, text)


def arguments(files: Path, made: Path, port: int) -> dict[str, Any]:
    """The engine's arguments: those of a case with overlap, for a model without weights. made: a folder for it."""
    for name in ("model", "draft"):
        (made / name).mkdir(parents=True)
        (made / name / "config.json").write_bytes(model_config())
    options = cases.OVERLAP | {"model_path": str(made / "model"), "load_format": "dummy",
                               "speculative_draft_model_path": str(made / "draft")}  # fmt: skip
    return cases.arguments(cases.Case("cost", RELEASE, "", steps=STEPS, options=options), files, made, port)


def prompts(batch: int) -> list[list[int]]:
    return [[TEXT_TOKENS[(row * 977 + token * 31) % len(TEXT_TOKENS)] for token in range(PROMPT)]
            for row in range(batch)]  # fmt: skip


def repetition(engine: Any, label: str, tokens: int) -> Repetition:
    """Serve one batch, and measure from the first request to the last answer."""
    names = [f"{label}-{row}" for row in range(BATCH)]
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begun = time.perf_counter()
    found = engine.generate(input_ids=prompts(BATCH), sampling_params=sampling, rid=names)
    seconds = time.perf_counter() - begun
    time.sleep(SETTLED)
    answers = {name: (list(one["output_ids"]), int(one["meta_info"]["spec_verify_ct"]))
               for name, one in zip(names, found, strict=True)}  # fmt: skip
    for name, (text, _) in answers.items():
        if len(text) != tokens:
            raise NotRight(f"{name}: {len(text)} tokens; {tokens} were requested")
    return Repetition(label.partition("-")[0], seconds, answers)


def checked(one: Repetition, folder: Path) -> Repetition:
    """Compare a recording with what was served: every token and every window. Raises `NotRight`."""
    if one.variant in (BARE, OFF):
        if folder.exists():
            raise NotRight(f"{folder.name}: there is a recording, but the recorder was off")
        return one
    try:
        stated = json.loads((folder / "recording.json").read_text())
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    except OSError as error:
        raise NotRight(f"{folder.name}: {error}") from None
    attached = stated["attached"]
    if attached["stopped"] or attached["missing"] or stated.get("events") != len(events):
        raise NotRight(f"{folder.name}: stopped: {attached['stopped']!r}, missing: {attached['missing']}, "
                       f"{stated.get('events')} events stated, {len(events)} lines")  # fmt: skip
    said, windows, rounds = _texts(events)
    if said.keys() != one.answers.keys():
        raise NotRight(f"{folder.name}: recorded {sorted(said)}, served {sorted(one.answers)}")
    for name, (tokens, count) in one.answers.items():
        if windows[name] != count or said[name][: len(tokens)] != tokens:
            raise NotRight(f"{name}: {count} windows and {len(tokens)} tokens were served; {windows[name]} windows and "
                           f"{len(said[name])} tokens were recorded, equal: {said[name][: len(tokens)] == tokens}")
    files = sorted((folder / "tensors").iterdir())
    every = VARIANTS[one.variant].get("every", attached["every"])
    expected = rounds // every if every else 0
    if not len(files) == attached["written"] == expected:
        raise NotRight(f"{folder.name}: {len(files)} events have states, {attached['written']} are stated, and "
                       f"{expected} of {rounds} rounds were expected")  # fmt: skip
    batches = sum(event["event"] == "commit" for event in events)
    if sum(windows.values()) < FULL * len(one.answers) * batches:
        raise NotRight(f"{folder.name}: {sum(windows.values())} windows in {batches} batches of {len(one.answers)}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Repetition(one.variant, one.seconds, one.answers, len(events), len(files), size)


def _texts(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Of recorded events: the tokens of each request, the number of its windows, and the number of rounds."""
    said, windows, drafts, rounds = dict[str, list[int]](), dict[str, int](), dict[str, list[int]](), 0
    for event in events:
        kind = event["event"]
        rounds += kind == "commit" or (kind == "forward" and any(row["kind"] != "verify" for row in event["rows"]))
        if kind == "draft":
            drafts = dict(zip(event["requests"], event["picks"], strict=True))
        for row in event.get("rows", ()):
            if "root" in row:
                said.setdefault(row["request"], []).append(row["root"])
        for name, path in zip(event.get("requests", ()), event.get("accepted", ()), strict=False):
            windows[name] = windows.get(name, 0) + 1
            said[name] += [*drafts[name][: len(path["nodes"])], path["bonus"]]
    return said, windows, rounds


def order(number: int) -> list[str]:
    """The variants of a repetition, each time with another one first."""
    names = list(VARIANTS)
    return names[number % len(names) :] + names[: number % len(names)]


def summary(found: Sequence[Repetition]) -> dict[str, Any]:
    """Throughput of every variant, and what it loses against `bare` of the same repetition."""
    speeds = {name: [one.speed for one in found if one.variant == name] for name in VARIANTS}
    made = {}
    for name, values in speeds.items():
        losses = [1 - value / bare for value, bare in zip(values, speeds[BARE], strict=True)]
        last = next(one for one in reversed(found) if one.variant == name)
        made[name] = {
            "tokens_per_second": _spread(values), "loss": None if name == BARE else _spread(losses),
            "limit": LIMITS.get(name), "events": last.events, "events_with_states": last.written, "bytes": last.size,
        }  # fmt: skip
    return made


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def sentence(name: str, one: Mapping[str, Any]) -> str:
    speed, loss = one["tokens_per_second"], one["loss"]
    said = f"{name:8} {speed['median']:8.0f} tokens/s ({speed['least']:.0f} to {speed['most']:.0f})"
    if loss is None:
        return said
    over = "" if loss["median"] <= one["limit"] else "  TOO SLOW"
    between = f"{loss['least']:.1%} to {loss['most']:.1%}"
    return f"{said}, loses {loss['median']:.1%} ({between}), limit {one['limit']:.0%}{over}"


def table(result: Mapping[str, Any] | None) -> str:
    """The result as it is in the documentation."""
    if result is None:
        return "The cost is not measured yet."
    made = ["| recorder | tokens per second | loss, median (least to most) | limit |", "|---|---|---|---|"]
    for name, one in result["variants"].items():
        loss, limit = one["loss"], one["limit"]
        said = "" if loss is None else f"{loss['median']:.1%} ({loss['least']:.1%} to {loss['most']:.1%})"
        made.append(f"| {SAYS[name]} | {one['tokens_per_second']['median']:,.0f} | {said} | "
                    f"{'' if limit is None else f'{limit:.0%}'} |")  # fmt: skip
    last = result["variants"][DEFAULT]
    return "\n".join([*made, "", (
        f"{result['machine']['device_name']}, SGLang {result['sglang']}, the shape of {result['shape']}, batch "
        f"{result['batch']}, {result['steps']} MTP steps, {result['accepted']} tokens a round, overlap, "
        f"{result['repetitions']} repetitions in one process; the default selection wrote "
        f"{last['bytes'] / 2**20:.0f} MiB per {result['batch'] * result['tokens']:,} tokens.")])


def measure(files: Path, out: Path, options: argparse.Namespace) -> int:
    """Start the engine, run all repetitions, and write the result. 0: within the limits."""
    import sglang  # type: ignore[import-not-found]

    from instep.report.result import Result

    folder, begun = Path(os.environ[FOLDER]), time.perf_counter()
    engine = sglang.Engine(**arguments(files, folder / "made", options.port))
    up, found = time.perf_counter() - begun, list[Repetition]()
    print(f"engine up in {up:.0f} s", flush=True)
    try:
        for number in range(-1, options.repetitions):  # the first one warms up: Triton compiles, memory is pinned
            for variant in order(max(number, 0)):
                label = f"{variant}-{number + 1}"
                one = checked(repetition(engine, label, options.tokens), folder / label)
                print(f"{label}: {one.speed:.0f} tokens/s, {one.events} events, {one.written} with states", flush=True)
                shutil.rmtree(folder / label, ignore_errors=True)
                found += [one] * (number >= 0)
    finally:
        engine.shutdown()
    variants = summary(found)
    for name, one in variants.items():
        print(sentence(name, one), flush=True)
    slow = [name for name, limit in LIMITS.items() if not variants[name]["loss"]["median"] <= limit]
    Result(int(bool(slow)), "cuda", {
        "command": f"python -m peers.live.cost BUNDLE {out.name} --repetitions {options.repetitions}",
        "sglang": sglang.__version__, "shape": SHAPE, "weights": "dummy", "batch": BATCH, "prompt": PROMPT,
        "tokens": options.tokens, "steps": STEPS, "accepted": ACCEPTED, "overlap": True,
        "repetitions": options.repetitions, "windows": max(count for _, count in found[0].answers.values()),
        "engine_seconds": round(up), "variants": variants,
    }, options.commit).write(out)  # fmt: skip
    print(f"in {PAGE}:\n{table(json.loads(out.read_text()))}")
    return int(bool(slow))


def declared(folder: Path) -> Path:
    """Write a distribution whose entry point is `load`, for Python's path."""
    info = folder / "peers_cost-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peers-cost\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ncost = peers.live.cost:load\n")
    return folder


# -- the command ------------------------------------------------------------------------------------


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.cost", description="Measure what a recording costs.")
    parser.add_argument("bundle", type=Path, help="the folder that peers.live.bundle made")
    parser.add_argument("out", type=Path, help="the result file")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024, help="per request")
    parser.add_argument("--port", type=int, default=31900)
    parser.add_argument("--commit", help="the revision of the source, for the result")
    parser.add_argument(ENGINE, action="store_true", help="run the engine itself: for the process that is measured")
    options = parser.parse_args(given)
    if options.repetitions < 1:
        parser.error("--repetitions: at least 1")
    files = unpacked(options.bundle)
    if options.engine:
        try:
            return measure(files, options.out, options)
        except NotRight as error:
            print(f"no result: {error}", file=sys.stderr)
            return 3
    with tempfile.TemporaryDirectory(prefix="peers-cost-") as made:
        around = environment(files.absolute(), RELEASE)
        own = (str(TOP / root) for root in ("harness", "reference", "optimized"))
        path = os.pathsep.join([str(declared(Path(made) / "plugin")), around["PYTHONPATH"], *own])
        around |= {FOLDER: made, "SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED), "PYTHONPATH": path}
        around.pop("INSTEP_ATTACH", None)
        return subprocess.run([sys.executable, "-m", "peers.live.cost", *(given or sys.argv[1:]), ENGINE],
                              env=around).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
