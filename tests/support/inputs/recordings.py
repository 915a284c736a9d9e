"""Recordings of the project's own engine, made by the writer that other projects paste into theirs.

Tests plant faults in the recorded lines with the functions at the end.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import to_builtins
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from instep.audit.write import Recording
from instep.generate.decode import Ask
from instep.player import Observer, Side
from instep.run.engine_without_comparison import engine
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.event_scheduler import drive
from instep.watch.player_observers import Activations
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.sampling import Sampling

TINY = Path("fixtures/tiny")
PROMPTS = {"a": tuple(b"Return the"), "b": tuple(b"def main(self):"), "c": tuple(b"0, 1, 2, 3")}


def recorded(
    directory: Path, *, shows: bool = True, tokens: int = 12, closed: bool = True,
    prompts: Mapping[str, tuple[int, ...]] = PROMPTS, layout: str = "KV", sampling: Sampling | None = None,
    given: bool = False,
) -> Path:
    """The engine decodes the prompts, two at a time, in chunks of 6, with up to 3 drafts; the writer looks on.

    given: it does not get the sampling and the uniforms
    """
    checkpoint = Checkpoint.open(TINY)
    ask = Ask(checkpoint, Setting(), prompts, 3, adaptive={"candidate_steps": [1, 3], "warmup_batches": 1,
                                                          "update_interval": 1}, tokens=tokens, batch=2, chunk=6,
              sampling=sampling)
    header = ask.header
    served = engine(checkpoint, ask.setting, header.room(), num_steps=header.num_steps,
                    adaptive=header.adaptive_file("adaptive"))  # fmt: skip
    made = Recording(directory, engine="instep plain", model=TINY, layout=layout)
    seen = Activations()
    served.watch(seen)
    watching = _Hooks(made, served, header, shows, layout, given)
    for _ in drive(ask.policy, prompts, header, served, [watching, seen]):
        pass
    if closed:
        made.close()
    return directory


def recording(**how: Any) -> Any:
    """A fixture: such a recording, made once for a module."""

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return recorded(tmp_path_factory.mktemp("recordings") / "right", **how)

    return made


class _Hooks(Observer):
    """The hooks that an engine's authors would write: after every forward, after acceptance, at each end."""

    def __init__(self, made: Recording, served: Any, header: Any, shows: bool, layout: str, given: bool) -> None:
        self.made, self.served, self.shows, self.layout, self.given = made, served, shows, layout, given
        self.rules = EventRules(header)

    def after(self, event: e.Event, side: Side) -> Side:
        before = dict(self.rules.table.live)
        complete = self._complete(event, side.answer)
        self.rules.apply(complete)
        match complete:
            case e.Admit(request=name, prompt=prompt, sampling=how):
                self.made.admit(name, prompt, None if self.given else how and to_builtins(how), self.given)
            case e.Forward(rows=rows):
                self._forward(rows, before, side)
            case e.Commit(requests=names, accepted=paths):
                said = {
                    name: [*(before[name].window[node] for node in path.nodes), path.bonus]
                    for name, path in zip(names, paths or (), strict=True)
                }
                self.made.accepted(said)
                self._states(names)
            case e.Finish(request=name):
                self.made.finish(name)
        return side

    def _forward(self, rows: tuple[e.Row, ...], before: Mapping[str, Any], side: Side) -> None:
        names, ran, at, said = [], [], [], []
        for row in rows:
            one = before[row.request]
            window = {"verify": one.window, "decode": (one.root,)}.get(row.kind)
            ids = one.prompt[one.length : one.length + row.tokens] if window is None else window
            names.append(row.request)
            ran.append(list(ids))
            at += range(one.length, one.length + len(ids))
            said.append(None if row.kind == "verify" else [] if row.root is None else [row.root])
        places = {name: side.places.get(Place("trunk", AFTER_LAYERS, name)) for name in ("logits", "final")}
        shown = {name: tensor for name, tensor in places.items() if self.shows and tensor is not None}
        tokens = torch.tensor([one for ids in ran for one in ids])
        uniforms = {row.request: row.uniforms for row in rows if row.uniforms and not self.given}
        self.made.forward(names, [len(ids) for ids in ran], at, tokens, said, **shown, uniforms=uniforms or None)
        self._states([row.request for row in rows if row.kind != "verify"])

    def _states(self, names: Any) -> None:
        for name in names if self.shows else ():
            state = self.served.state(name)
            layers = {
                layer: (state.conv[layer], state.state[layer].mT if self.layout == "VK" else state.state[layer])
                for layer in state.state
            }
            self.made.states(name, layers)

    def _complete(self, event: Any, answer: Any) -> Any:
        """The event with the engine's choices filled in, as the driver does it."""
        match event:
            case e.Draft(picks=None):
                return replace(event, picks=tuple(map(tuple, answer.drafts.tolist())))
            case e.Forward():
                return replace(event, rows=tuple(
                    replace(row, root=answer.roots.get(row.request)) if row.kind != "verify" else row
                    for row in event.rows
                ))
            case e.Commit(accepted=None):
                paths = zip(answer.num_correct_drafts.tolist(), answer.bonus.tolist(), strict=True)
                return replace(event, accepted=tuple(e.Path(tuple(range(1, n + 1)), bonus) for n, bonus in paths))
        return event


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(file: Path, requests: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return file


def edited(recording: Path, event: int, **fields: object) -> Path:
    """The recording with one event changed, as one that was never closed."""
    events = lines(recording / "events.jsonl")
    events[event] |= fields
    said(recording / "events.jsonl", events)
    stated = json.loads((recording / "recording.json").read_text())
    (recording / "recording.json").write_text(json.dumps(stated | {"events": None, "sha256": None}))
    return recording


def shown(recording: Path, event: int) -> dict[str, torch.Tensor]:
    return load_file(recording / "tensors" / f"{event:06d}.safetensors")


def tensors(recording: Path, event: int, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = recording / "tensors" / f"{event:06d}.safetensors"
    found = shown(recording, event)
    save_file(found | {name: change(found[name]).contiguous()}, file)


def stated(recording: Path, **fields: object) -> None:
    known = json.loads((recording / "recording.json").read_text())
    (recording / "recording.json").write_text(json.dumps(known | fields))
