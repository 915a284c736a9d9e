"""`python -m peers.live.cut`: cut a short recording out of a long one, around its first step-count switch of that size.

It keeps a few requests and every event up to two commits after the switch. It keeps the states of the last commit
before the switch and of the two after it. Leaves out: the judgement.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.audit.cut_recording import Kept, write_part
from instep.audit.recording import EVENTS, read

AFTER = 2  # commits after the switch


def cut(recording: Path, out: Path, requests: Sequence[str] = (), count: int = 3) -> int:
    """Write the short recording -> its number of events. requests: their names; left out: the first `count`."""
    events = [json.loads(line) for line in (recording / EVENTS).read_text().splitlines()]
    admitted = [event["request"] for event in events if event["event"] == "admit"]
    chosen = set(requests or admitted[:count])
    if not chosen <= set(admitted):
        raise SystemExit(f"{recording} has no request {', '.join(sorted(chosen - set(admitted)))}")
    with_states, end = around(events)
    write_part(recording, out, Kept(tuple(chosen), end), with_states)
    return len(read(out).events)


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
