"""The tables and pictures of the README and of the pages of results, made from the files under `fixtures/`.

`python -m documentation.tables` writes all of them. Leaves out: measuring.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.report.result import read
from instep_optimized.ops import BY_NAME, load
from instep_optimized.options import Options, check
from instep_proof.faults.catalogue import FAMILIES
from instep_proof.faults.compare_with_control import HYPOTHESIS
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.drafters import DRAFTERS, EXTERNAL
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.recurrences import WITH_FIXED_MEMORY
from instep_reference.contract.shards import UNDECLARED
from peers.run import UNJUDGED
from support.inputs.checkpoints import Kind, config_of

from . import bench_plots, bench_tables, calibration_tables, fault_tables, markdown, peers_table
from .parity_table import stored, table

TOP = Path(__file__).resolve().parents[2]
FOUND = TOP / "docs" / "found"
PAGES = (  # with tables
    TOP / "README.md", FOUND / "README.md",
    *(TOP / "docs" / f"{name}.md"
      for name in ("limits", "results", "results-agreement", "speed", "peers", "live-results")),
)  # fmt: skip
RESULTS = TOP / "fixtures" / "results"
SECTION = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


# Model type -> released models, its name among small models, a trace, and its planted faults ("": all other families).
TYPES: dict[str, tuple[str, Kind, str, str]] = {
    "qwen3_5": ("Qwen3.5", "dense", "adaptive", ""),
    "qwen3_5_moe": ("Qwen3.5 with experts", "moe", "faults/experts", ""),
    "qwen3_next": ("Qwen3-Next", "next", "faults/next", ""),
    "kimi_linear": ("Kimi-Linear-48B-A3B", "kimi", "faults/kimi", "kimi"),
    "olmo_hybrid": ("Olmo-Hybrid-7B", "olmo", "faults/olmo", "olmo"),
    "bailing_hybrid": ("Ling 3", "ling", "faults/ling", "ling"),
    "nemotron_h": ("Nemotron-H, Nemotron 3 (Nano, Super, Ultra)", "nemotron", "faults/nemotron", "nemotron"),
    "lfm2": ("LFM2-350M to 2.6B", "lfm2", "faults/lfm2", "lfm2"),
    "minimax": ("MiniMax-Text-01 as `transformers` converts it", "minimax", "faults/minimax", "minimax"),
    "qwen4_exp": ("Qwen4-Exp", "qwen4", "faults/qwen4", "qwen4"),
}


def served() -> str:
    """One line per model type: its recurrence, op sets that serve it, drafts, ranks, a trace and planted faults."""
    head = ("model type", "released models", "recurrence", "op sets", "MTP", "ranks", "trace", "planted faults")
    lines = []
    own = {family for *_, family in TYPES.values()}
    for name, (released, kind, trace, family) in TYPES.items():
        model = ModelConfig.from_dict(config_of(kind))
        sets = [ops for ops in BY_NAME if _serves(ops, model)]
        planted = sum(len(faults) for one, faults in FAMILIES.items() if (one == family if family else one not in own))
        lines.append((
            f"`{name}`", released, " ".join(f"`{row}`" for row in WITH_FIXED_MEMORY if row in model.mixers),
            "all" if len(sets) == len(BY_NAME) else ", ".join(f"`{ops}`" for ops in sets),
            "yes" if (name, "eagle") in DRAFTERS else "no", "no" if name in UNDECLARED else "yes",
            f"`{trace}`" if trace else "", planted if family else f"{planted} for all of Qwen",
        ))  # fmt: skip
    return markdown.table(head, lines)


def _serves(ops: str, model: ModelConfig) -> bool:
    try:
        check(Options(drafter=EXTERNAL), model, 1, load(ops))
    except Unsupported:
        return False
    return True


def parity() -> str:
    return table(stored())


def replay() -> str:
    """One line per run of the committed results; under T2, T2d, T3 the largest part of an allowance that was used."""
    tiers, lines = ("T2", "T2d", "T3"), []
    for file in sorted(RESULTS.glob("replay-*.json")):
        result = read(file)
        for run in result["runs"]:
            used, held = {tier["tier"]: tier["used"] for tier in run["tiers"]}, ", graphs" * run["graphs"]
            kind = run["dtype"] if "T2" in used else "labels"
            lines.append((
                f"`{run['ops']}` {kind}, {run['layout']}, {run['strategy']}{held}", _machine(result["machine"]),
                f"{run['events']} of {run['of']}", f"{sum(tier['blocks'] for tier in run['tiers']):,}",
                f"{run['elements']:,}", "exact", *(f"{used[tier]:.2f}" if tier in used else "" for tier in tiers),
            ))  # fmt: skip
    return markdown.table(("run", "where", "events", "blocks", "elements", "T0, T1", *tiers), lines)


def in_settings() -> str:
    """One line per op set and group of settings: traces, runs, pairs or values of settings, numbers."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in _read("settings-cpu.json")["arrays"]:
        some = f"first {one['until'] + 1}" if one["settings"] != "each" and one["until"] is not None else ""
        groups.setdefault((one["ops"], one["settings"], some), []).append(one)
    lines = []
    for (ops, settings, some), ones in groups.items():
        names = sorted({one["trace"] for one in ones})
        lines.append((
            f"`{ops}`", ", ".join(names) if len(names) < 5 else f"{len(names)} others",
            settings.replace(",", ", "), some or ("at most the first 31" if settings == "each" else "all"),
            sum(len(one["ran"]) for one in ones), f"{sum(one['met'] for one in ones)} of "
            f"{sum(one['of'] for one in ones)}", f"{sum(one['elements'] for one in ones):,}",
        ))  # fmt: skip
    return markdown.table(("op set", "traces", "settings", "events", "runs", "values or pairs met", "numbers"), lines)


def tiny() -> str:
    quality = json.loads((TOP / "fixtures" / "tiny" / "quality.json").read_text())
    bits, decoding = quality["bits_per_byte"]["held_out"], quality["decoding"]
    rows = {
        "bits per byte, held-out text": f"{bits['trunk']:.2f}",
        "accepted of 3 drafts, greedy decoding from held-out prompts": f"{decoding['mean_accepted_drafts']:.2f}",
        "the same, single rounds within held-out text": f"{decoding['held_out_text']['mean_accepted_drafts']:.2f}",
        "file": f"{(TOP / 'fixtures' / 'tiny' / 'model.safetensors').stat().st_size:,} bytes",
    }
    return markdown.table(("measured", ""), rows.items())


BENCH = "bench-native.json"  # of `tests/on_gpu.sh`


def strategies() -> str:
    """Bytes per request and layer, and microseconds of one verify with its commit, per layer, by batch."""
    return bench_tables.strategies(_read(BENCH))


def memory() -> str:
    """Memory of a request of a 9B model, by strategy and conv form."""
    needs = _read("memory-9b.json")["strategies"]
    state = min(need["pools"]["state"] for need in needs)
    return markdown.table(
        ("strategy", "conv form", "MiB a request", "more than its state", "requests in 64 GiB"),
        ((f"`{need['strategy']}`", f"`{need['conv']}`", f"{need['fixed'] / 2**20:.1f}",
          f"{(need['fixed'] - state) / 2**20:.1f}", need["fit"]) for need in needs))


def shapes() -> str:
    """The real shapes, checked after every event."""
    lines = []
    for run in _read("shapes-native.json")["runs"]:
        tiers = {tier["tier"]: tier for tier in run["tiers"]}
        lines.append((run["name"], f"`{run['strategy']}`", f"{run['events']} of {run['of']}",
                      f"{tiers['T2d']['blocks']:,} blocks", f"{run['elements']:,}", "exact",
                      f"{tiers['T2d']['used']:.2f}"))
    heads = ("model", "strategy", "events", "states under T2d", "numbers compared", "T0, T1", "T2d")
    return markdown.table(heads, lines)


def score() -> str:
    """Sentences of the README: planted faults, correct engines, and whole engines of others."""
    planted, variants = _read("faults.json"), _read("calibration.json")
    alarms, blocks = (_sum(variants["false_alarms"], field) for field in ("alarms", "blocks"))
    return (
        f"Planted faults: {planted['found']} of {planted['fired']} found, {planted['located']} located, "
        f"{planted['named']} named ({_by(planted['named_by'])}).\n"
        f"Correct engines: {alarms} of {blocks:,} compared blocks of {variants['variants']} engines called wrong "
        f"([results](docs/results.md)).\n{peers_table.live_in_short(_read('live.json'))}"
    )


def found() -> str:
    """The short table of results: what was tested, and the outcome, from the other files."""
    planted, variants = _read("faults.json"), _read("calibration.json")
    families = {one["family"] for one in planted["results"]}
    reported = sum(bool(re.search(r"\d", one["origin"])) and not one["void"] for one in planted["results"])
    equal, raised = fault_tables.unheard(planted)
    blocks = sum(rate["blocks"] for rate in variants["false_alarms"])
    peers, sizes = (_read(name)["runs"] for name in ("fla-native.json", "shapes-native.json"))
    fla = [run for run in peers if run["ops"] == "fla"]
    version = _read("fla-native.json")["peers"]["fla-core"]
    worst = max(row.worst for row in stored() if row.width == "fp64")
    rows = {
        f"{planted['fired']} faults in {len(families)} families, planted one at a time in a copy of this engine; "
        f"{reported} of them carry the number of a bug that another project reported":
            f"{planted['found']} found, {planted['located']} located at the first wrong event and place, "
            f"{planted['named']} named in words, {_by(planted['named_by'])}"
            + f"; {planted['void']} more were void on that machine" * bool(planted["void"]),
        "the same faults, when only the generated text is looked at":
            f"{len(equal)} leave every token as it was, {len(raised)} others raise the acceptance rate; "
            f"{sum(one['found'] for one in (*equal, *raised))} of these {len(equal) + len(raised)} are found",
        f"{variants['variants']} correct engines that differ in rounding, order of sums, strategy, layout or chunks":
            f"{_sum(variants['false_alarms'], 'alarms')} of {blocks:,} judged blocks called wrong",
        f"FLA's kernels (fla-core {version}) in the place of ours, layers of "
        f"{_names(fla)}, {_machine(_read('fla-native.json')['machine'])}": _agreed(fla),
        f"our kernels in layers of {_names(sizes)}, {_machine(_read('shapes-native.json')['machine'])}": _agreed(sizes),
        "random rounds with requests that arrive and leave, every event compared (`instep soak`)": _soaked(),
        "our reference against `transformers`, fp64": f"worst relative error {worst:.0e}",
    }  # fmt: skip
    return markdown.table(("what was tested", "result"), rows.items())


def _soaked() -> str:
    """The rounds of each op set, and what was found in them."""
    runs, rounds = _read("soak.json")["soaked"], Counter[str]()
    for run in runs:
        for session in run["sessions"]:
            where = f" on an {session['machine']['device_name']}" * (run["setting"]["device"] != "cpu")
            rounds[f"`{run['setting']['ops']}`{where}"] += session["rounds"]
    told = ", ".join(f"{count:,} of {name}" for name, count in sorted(rounds.items()))
    commits = {session["commit"] for run in runs for session in run["sessions"]}
    return f"{told}, by {len(commits)} revisions: {sum(len(run['found']) for run in runs)} findings"


def _by(counts: dict[str, int]) -> str:
    """79 by a sentence written for the mistake, 169 by a general one"""
    written, named = counts[HYPOTHESIS], sum(counts.values())
    return f"{written} by a sentence written for the mistake, {named - written} by a general one"


def _agreed(runs: list[dict[str, Any]]) -> str:
    """Results of runs under T0, T1 and T2d."""
    wrong = [run["name"] for run in runs if run["exit"]]
    used = max(tier["used"] for run in runs for tier in run["tiers"] if tier["tier"] == "T2d")
    blocks = sum(tier["blocks"] for run in runs for tier in run["tiers"] if tier["tier"] == "T2d")
    came = f"{blocks:,} blocks of states, at most {used:.2f} of what is allowed; bytes exact"
    return f"agree: {came}" if not wrong else f"DIVERGED: {', '.join(wrong)}"


def _names(runs: list[dict[str, Any]]) -> str:
    """Names of the models, "qwen3.5-9b and qwen3.5-27b", without the text after a comma"""
    names = list(dict.fromkeys(run["name"].partition(",")[0] for run in runs))
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _sum(rows: list[dict[str, Any]], field: str) -> int:
    return sum(row[field] for row in rows)


def faults() -> str:
    return fault_tables.score(_read("faults.json"))


def unseen() -> str:
    return fault_tables.unseen(_read("faults.json"))


def calibration() -> str:
    """How often correct engines are called wrong, and how small an injected error is found."""
    result = _read("calibration.json")
    made = f"`{result['command']}`:"
    return f"{made}\n\n{calibration_tables.alarms(result)}\n\n{calibration_tables.limits(result)}"


def slips() -> str:
    """Whether correct engines err to one side, and the smallest slip that is found."""
    result = _read("one-sided.json")
    return f"`{result['command']}`:\n\n{calibration_tables.slips(result)}"


def effect() -> str:
    """Gain of adaptive step counts in layers of a 9B model; medians of laps over the same forced events."""
    return bench_tables.effect(_read(BENCH))


def peers() -> str:
    """Layers of real shape, the same op with our kernels and with FLA's."""
    result = _read("fla-native.json")
    apart = {(one["name"], one["strategy"]): one["worst"] for one in result["apart"]}
    head = ["layer of", "delta rule by", "strategy", "states under T2d", "T0, T1", "T2d", "states from ours, at worst"]
    lines = []
    for run in result["runs"]:
        directed = next(tier for tier in run["tiers"] if tier["tier"] == "T2d")
        off = f"{apart[run['name'], run['strategy']]:.1e}" if run["ops"] == "fla" else ""
        lines.append((run["name"].partition(",")[0], f"`{run['ops']}`", f"`{run['strategy']}`",
                      f"{directed['blocks']:,} blocks", "exact", f"{directed['used']:.2f}", off))
    return markdown.table(head, lines)


def others() -> str:
    """Judged kernels and engines of other people, by package: how many entries agree, and which have a finding."""
    by: dict[str, list[dict[str, Any]]] = {}
    for row in (*_read("peers.json")["rows"], *_read("peers-native.json")["rows"]):
        if row["verdict"] != UNJUDGED:
            by.setdefault(row["package"], []).append(row)
    lines = []
    for package, rows in by.items():
        versions = ", ".join(dict.fromkeys(row["version"] for row in rows))
        wrong: dict[str, list[str]] = {}
        for row in rows:
            if row["verdict"] not in ("agree", "missing"):
                wrong.setdefault(row["name"], []).append(row["version"])
        every = versions.split(", ")
        said = "; ".join(name if found == every else f"{name} ({', '.join(found)})" for name, found in wrong.items())
        agree = sum(row["verdict"] == "agree" for row in rows)
        lines.append((package, versions, len(rows), agree, said or "nothing"))
    return markdown.table(("package", "versions", "tested", "agree", "findings"), lines)


def combined() -> str:
    """The product of all options: what is refused, and what was run of the rest."""
    result = _read("combinations.json")
    rows = {
        f"combinations of {', '.join(name.replace('_', ' ') for name in result['factors'])}":
            f"{math.prod(result['factors'].values()):,}",
        **{f"refused before anything runs: {why}": f"{count:,}" for why, count in result["refused"].items()},
        "served": f"{result['served']:,}",
        "of these replayed, each on both sides in all tiers":
            f"{result['run']:,}, {len(result['found'])} do not agree; {result['events']:,} events, "
            f"{result['blocks']:,} blocks, {result['seconds'] / 60:.0f} minutes",
        **{f"{what} of values that are served": f"{run:,} of {of:,} were replayed"
           for what, (run, of) in result["met"].items()},
    }  # fmt: skip
    return markdown.table(("what", "how many"), rows.items())


def scripts() -> str:
    """The scripts of docs/found by the first line of each."""
    lines = []
    for file in sorted(FOUND.glob("*.py")):
        package, _, says = file.read_text().removeprefix('"""').partition("\n")[0].partition(": ")
        lines.append((package, says, f"[{file.name}]({file.name})"))
    return markdown.table(("package", "what is wrong", "script"), lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "score": score, "fast": lambda: bench_tables.brief(_read(BENCH)),
    "found": found, "replay": replay, "in_settings": in_settings,
    "parity": parity, "tiny": tiny, "strategies": strategies, "memory": memory,
    "ranks": lambda: bench_tables.over_ranks(_read("bench-ranks.json")),
    "speed": lambda: bench_tables.speed(_read(BENCH)), "behind": lambda: bench_tables.behind(_read(BENCH)),
    "shapes": shapes, "effect": effect, "peers": peers, "faults": faults, "unseen": unseen,
    "calibration": calibration, "slips": slips, "combined": combined, "others": others,
    "scripts": scripts, "served": served,
    "others_in_full": lambda: peers_table.table(_read("peers.json")),
    "controllers": lambda: peers_table.controllers(_read("controllers.json")),
    "live": lambda: peers_table.live(_read("live.json")),
    "others_native": lambda: peers_table.table(_read("peers-native.json")),
}


def pictures() -> dict[Path, str]:
    """Path of a picture -> its content, drawn from the files."""
    return {TOP / "docs" / name: text for name, text in bench_plots.pictures(_read(BENCH)).items()}


def rendered(text: str) -> str:
    """A page with every generated section as the files have it."""

    def fill(found: re.Match[str]) -> str:
        make = SECTIONS.get(found[1])
        return found[0] if make is None else f"<!-- generated: {found[1]} -->\n{make()}\n<!-- end -->"

    return SECTION.sub(fill, text)


def sections() -> list[tuple[str, str]]:
    """(name, content) of every generated section, over all pages."""
    return [(found[1], found[2]) for page in PAGES for found in SECTION.finditer(page.read_text())]


def _read(name: str) -> dict[str, Any]:
    return read(RESULTS / name)


def _machine(machine: dict[str, Any]) -> str:
    """The machine of a run: "NVIDIA H200, torch 2.11.0, triton 3.6.0", or "CPU, torch 2.13.0"."""
    if machine["device"] == "cpu":
        return f"CPU, torch {machine['torch']}"
    return f"{machine['device_name']}, torch {machine['torch']}, triton {machine['triton']}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    for file, text in pictures().items():
        file.write_text(text)
