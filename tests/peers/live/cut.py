"""`python -m peers.live.cut`: cut a short recording out of a long one, around its first step-count switch of that size.

It keeps a few requests and every event up to two commits after the switch. Of states it keeps those of the last commit
before the switch and of the two after it. Leaves out: the judgement.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from instep.audit.recording import BATCHES, EVENTS, META, TENSORS

AFTER = 2  # commits after the switch
STATES = ("conv", "state", "slot")
BY_REQUEST = ("picks", "parents", "accepted")  # lists that go with an event's list of requests


def cut(recording: Path, out: Path, requests: Sequence[str] = (), count: int = 3) -> int:
    """Write the short recording -> its number of events. requests: their names; left out: the first `count`."""
    events = [json.loads(line) for line in (recording / EVENTS).read_text().splitlines()]
    admitted = [event["request"] for event in events if event["event"] == "admit"]
    chosen = set(requests or admitted[:count])
    if not chosen <= set(admitted):
        raise SystemExit(f"{recording} has no request {', '.join(sorted(chosen - set(admitted)))}")
    with_states, end = around(events)
    kept = {number: one for number, event in enumerate(events[:end]) if (one := without_others(event, chosen))}
    places = {number: place for place, number in enumerate(kept)}  # the new number of each event
    (out / TENSORS).mkdir(parents=True)
    layers, written = set[int](), 0
    for number, place in places.items():
        found = tensors(recording / TENSORS / f"{number:06d}.safetensors", chosen, number in with_states)
        if found:
            save_file(found, out / TENSORS / f"{place:06d}.safetensors")
        states = {int(name.rpartition(".")[2]) for name in found if name.startswith("state.")}
        layers, written = layers | states, written + bool(states)
    lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in kept.values())
    (out / EVENTS).write_text(lines)
    if (recording / BATCHES).exists():
        batches = [json.loads(line) for line in (recording / BATCHES).read_text().splitlines()]
        (out / BATCHES).write_text("".join(batch_lines(batches, places, chosen)))
    stated = json.loads((recording / META).read_text())
    commits = sum(event["event"] == "commit" for event in kept.values())
    attached = (stated.get("attached") or {}) | {"layers": sorted(layers), "written": written,
                                                 "dropped": commits - written}  # fmt: skip
    stated |= {"attached": attached, "events": len(kept), "sha256": hashlib.sha256(lines.encode()).hexdigest()}
    (out / META).write_text(json.dumps(stated, indent=1) + "\n")
    return len(kept)


def around(events: Sequence[Mapping[str, Any]]) -> tuple[set[int], int]:
    """The commits next to the first change of the step count, and the number of the last event, plus one."""
    commits = [number for number, event in enumerate(events) if event["event"] == "commit"]
    switches = [number for number, event in enumerate(events) if event["event"] == "set_num_steps"]
    for switch in switches:
        before = [number for number in commits if number < switch]
        after = [number for number in commits if number > switch][:AFTER]
        if before and len(after) == AFTER:
            return {before[-1], *after}, after[-1] + 1
    raise SystemExit(f"no change of the step count with a commit before it and {AFTER} after it")


def without_others(event: Mapping[str, Any], chosen: set[str]) -> dict[str, Any] | None:
    """The event without requests that are not chosen; None: nothing is left of it."""
    if "request" in event:
        return dict(event) if event["request"] in chosen else None
    if "rows" in event:
        rows = [row for row in event["rows"] if row["request"] in chosen]
        return {**event, "rows": rows} if rows else None
    if "requests" not in event:
        return dict(event)
    places = [place for place, name in enumerate(event["requests"]) if name in chosen]
    lists = {name: [event[name][place] for place in places] for name in ("requests", *BY_REQUEST) if event.get(name)}
    return {**event, **lists} if places else None


def tensors(file: Path, chosen: set[str], states: bool) -> dict[str, Any]:
    """The tensors of the chosen requests; states: whether theirs are among them."""
    if not file.exists():
        return {}
    kept = dict[str, Any]()
    for name, tensor in load_file(file).items():
        kind, _, rest = name.partition(".")
        request = rest.rpartition(".")[0] if kind in ("conv", "state") else rest
        if request in chosen and (states or kind not in STATES):
            kept[name] = tensor
    return kept


def batch_lines(
    batches: Iterable[Mapping[str, Any]], places: Mapping[int, int], chosen: set[str]
) -> Iterator[str]:
    """The batches of the events that are kept. The rounds of all others are needed for the averages of step counts."""
    rounds = list[Any]()
    for batch in batches:
        rounds += batch.get("rounds", ())
        if batch["event"] not in places:
            continue
        names = {key: {name: at for name, at in batch[key].items() if name in chosen} for key in ("rows", "slots")}
        found = {**batch, "event": places[batch["event"]], **names} | ({"rounds": rounds} if rounds else {})
        yield json.dumps(found, separators=(",", ":")) + "\n"
        rounds = []


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.cut", description="Cut a short recording out of a long one.")
    parser.add_argument("recording", type=Path)
    parser.add_argument("out", type=Path, help="the new directory")
    parser.add_argument("--requests", default="", help="their names, with commas; left out: the first three")
    options = parser.parse_args(given)
    events = cut(options.recording, options.out, [one for one in options.requests.split(",") if one])
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"{options.out}: {events} events, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
