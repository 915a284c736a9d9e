"""Let a fault's engine run freely: its own drafts, picks and acceptance, on the schedule of the fault's trace.

The result is what a test of accuracy would see: texts, and the number of accepted drafts. Leaves out: judging.

    python -P -m instep_proof.faults.free_run TRACE TOKENS OUT.json HOW      (how: JSON of a `Setting`)
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from instep.run.engine_without_comparison import engine, header_of
from instep.run.replay import served
from instep.setting import Setting
from instep.subject.proposers import ngram
from instep.trace.event_rules import EventRules
from instep.trace.event_scheduler import drive
from instep.trace.file import Trace, read
from instep.trace.policy import Policy, read_policy
from instep.trace.request_table import Standing
from instep.watch.event_digests import feed
from instep.watch.player_observers import LastStates
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.drafters import EXTERNAL
from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, RequestState
from instep_reference.contract.event_facts import committed_paths

ENDLESS = 1000  # rounds: more than any run needs
POLICY = ".policy.json"  # next to every trace of a fault: the policy from which it was recorded


def spoken(trace: Path, setting: Setting, tokens: int) -> dict[str, Any]:
    """Generate `tokens` tokens for every request. An engine that raises keeps its tokens so far, and its error."""
    loaded = read(trace)
    setting = setting.recorded(loaded.header.recording)
    checkpoint = Checkpoint.open(trace.parent / loaded.header.checkpoint.near, setting.mode)
    policy = freed(read_policy(trace.with_suffix(POLICY)), loaded, tokens)
    header, _ = header_of(policy, checkpoint, recording=loaded.header.recording)
    propose = ngram if setting.mode == EXTERNAL else None  # external drafts need a source
    plain = engine(checkpoint, setting, header.room(), **header.steps("policy"))
    last, events, error = LastStates(plain, _digest), [], ""
    prompts = {arrival.prompt: _prompts(loaded)[arrival.request] for arrival in policy.arrivals}
    try:
        for step in drive(policy, prompts, header, plain, [last], propose):
            events.append(step.event)
    except Exception as broken:  # any exception: a user sees that it failed
        error = f"{type(broken).__name__}: {' '.join(str(broken).split())}"
    rules = EventRules(header)
    for event in events:
        rules.apply(event)
    standings = {one.request: one for one in (*rules.table.ended, *rules.table.live.values())}
    return _data(standings, events, tokens) | {"states": last.found, "error": error, "served": served()}


def freed(policy: Policy, trace: Trace, tokens: int) -> Policy:
    """The policy without forced acceptance, with room for `tokens` tokens of every request."""
    room, widest = policy.capacity, max((*trace.header.candidates, policy.num_steps)) + 1
    prompts = _prompts(trace)
    arrivals = tuple(
        msgspec.structs.replace(arrival, max_new=tokens) for arrival in policy.arrivals if arrival.request in prompts
    )
    longest = max(map(len, prompts.values())) + tokens + 2 * widest
    count = len(arrivals) * -(-longest // room.page_size)
    spare = (page for page in range(1, len(room.pages) + count + 1) if page not in room.pages)
    pages = (*room.pages, *(page for page, _ in zip(spare, range(count - len(room.pages)), strict=False)))
    room = msgspec.structs.replace(room, pages=pages, max_positions=None)
    return msgspec.structs.replace(policy, accept=(), rounds=ENDLESS, arrivals=arrivals, capacity=room)


def _prompts(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Map each request to its prompt."""
    return {event.request: event.prompt for event in trace.events if isinstance(event, Admit)}


def _data(standings: Mapping[str, Standing], events: Iterable[AnyEvent], tokens: int) -> dict[str, Any]:
    """The result. drafts: number of verified drafts; accepted: how many of them the engine accepted."""
    drafts = accepted = 0
    windows: dict[str, int] = {}
    for event in events:
        if isinstance(event, Commit) and event.accepted is not None:
            accepted += sum(len(path.nodes) for path in committed_paths(event))
            drafts += sum(windows[request] for request in event.requests)
        elif isinstance(event, Draft) and event.picks is not None:
            windows |= dict(zip(event.requests, map(len, event.picks), strict=True))
    texts = {name: list(standing.said[:tokens]) for name, standing in standings.items()}
    return {"texts": texts, "drafts": drafts, "accepted": accepted}


def _digest(state: RequestState) -> str:
    """The digest of a request's logical state at its finish."""
    digest = hashlib.blake2b(digest_size=16)
    feed(digest, state)
    return digest.hexdigest()


def main(argv: list[str]) -> None:
    trace, tokens, out, how = argv
    said = spoken(Path(trace), msgspec.json.decode(how, type=Setting), int(tokens))
    Path(out).write_bytes(msgspec.json.encode(said))


if __name__ == "__main__":
    main(sys.argv[1:])
