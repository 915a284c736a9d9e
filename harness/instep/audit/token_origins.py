"""Prompt and generated tokens of every request, with the event that chose each token; and the counts of windows.

Whether a commit counted its accepted drafts correctly follows from the window and the bonus alone: with greedy and with
drawn tokens, the bonus is never the token of a child. Leaves out: whether a token is right, which needs the model
(`tokens.py`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths, facts, kind_of, named
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.sampling import Drawing

from ..finding_problem import Problem
from ..generate.decode import Drawn, drawn_at
from ..trace.event_rules import EventRules
from ..verdict import Comparison, Skipped, Tier

PICK = Place("trunk", AFTER_LAYERS, "pick")
CUT = "the request ended here, and the engine may have cut its last window"


@dataclass(frozen=True)
class Origin:
    """The event that chose a token. event: number of an event or a line; kind: of the event, or "line"; role: in it."""

    event: int
    kind: str
    role: str = "token"


@dataclass(frozen=True)
class Window:
    """The drafts of one request in a draft event. at: its committed tokens, so the root has this position."""

    event: int
    at: int
    picks: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A request: its prompt, its generated tokens, and the origin of each of them.

    known  number of leading tokens that are not judged here: a copy of another request's text, or of earlier events
    drawn  the drawing of each token, and its node in the window; None: argmax
    given  whether the recording does not have how its tokens were chosen, so that none is judged
    windows  its drafts, as far as they were not judged elsewhere
    """

    request: str
    prompt: tuple[int, ...]
    said: tuple[int, ...]
    origins: tuple[Origin, ...]
    known: int = 0
    drawn: tuple[Drawn | None, ...] = ()
    windows: tuple[Window, ...] = ()
    given: bool = False

    @property
    def run(self) -> tuple[int, ...]:
        """The tokens that the reference reads. From the prompt's last one on, each has a generated token after it."""
        return (*self.prompt, *self.said[:-1])

    def up_to(self, tokens: int | None) -> "Text":
        """The same text with at most this many generated tokens."""
        if tokens is None:
            return self
        end = len(self.prompt) + len(self.said[:tokens])
        windows = tuple(window for window in self.windows if window.at < end)
        return replace(self, said=self.said[:tokens], drawn=self.drawn[:tokens], windows=windows)

    def within(self, events: range) -> "Text":
        """The same text up to the last of these events; tokens of earlier events count as known."""
        chosen = [origin.event for origin in self.origins[: len(self.said)]]
        earlier = sum(event < events.start for event in chosen)
        cut = self.up_to(sum(event < events.stop for event in chosen))
        windows = tuple(window for window in cut.windows if window.event in events)
        return replace(cut, known=max(self.known, earlier), windows=windows)


@dataclass
class Told:
    """The texts of a recording, and the numbers of its windows, of their drafts, and of accepted drafts."""

    texts: list[Text] = field(default_factory=list)
    counts: list[Comparison | Skipped] = field(default_factory=list)
    windows: int = 0
    drafts: int = 0
    accepted: int = 0

    def add_window(self, count: Comparison | Skipped, drafts: int, accepted: int) -> None:
        self.counts.append(count)
        self.windows, self.drafts, self.accepted = self.windows + 1, self.drafts + drafts, self.accepted + accepted


def told(rules: EventRules, events: Sequence[e.AnyEvent], where: str, judged: range | None = None) -> Told:
    """Read the events one by one; an illegal one is bad input.

    where: the name of their file. judged: the events whose windows count, None: all
    """
    found, open_texts, flying = Told(), dict[str, Text](), dict[str, Drawing]()
    ends = last_commits(events)
    saved: dict[str, Text] = {}
    for index, event in enumerate(events):
        windows = {name: rules.table.live[name] for name in getattr(event, "requests", ()) if name in rules.table.live}
        before = rules.table.as_it_stands()
        rules.apply(event, f"{where} line {index + 1}")
        drawn = defaultdict[str, list[Drawn]](list)
        for name, how in drawn_at(event, before, flying):
            drawn[name].append(how)
        request, under = (getattr(event, field, "") for field in ("request", "name"))
        match facts(event).copy:
            case "restore" if under in saved:  # else it is a prefix, and the prompt does not change
                kept = saved[under]
                open_texts[request] = replace(kept, request=request, known=len(kept.said), windows=())
            case "drop":
                saved.pop(under, None)
            case "keep" if under:
                saved[under] = open_texts[request]
        match event:
            case e.Admit(request=name):
                _end(found, open_texts.pop(name, None))
                open_texts[name] = Text(name, event.prompt, (), (), given=event.given)
            case e.Draft(requests=names):
                for name, picks in zip(names, event.picks or (), strict=True):
                    standing, text = rules.table.live[name], open_texts[name]
                    window = Window(index, standing.length, picks, standing.parents[1:])
                    open_texts[name] = replace(text, windows=(*text.windows, window))
            case e.Forward(rows=rows):
                for row in rows:
                    if row.root is not None:
                        role = "first token" if row.kind == "prefill" else "token"
                        _say(open_texts, row.request, (row.root,), [Origin(index, kind_of(event), role)], drawn)
            case e.Commit(requests=names):
                for name, path in zip(names, committed_paths(event), strict=True):
                    standing = windows[name]
                    drafts = [standing.window[node] for node in path.nodes]
                    origins = [
                        Origin(index, kind_of(event), f"accepted draft {number} of {len(standing.window) - 1}")
                        for number in range(1, len(drafts) + 1)
                    ]
                    origins.append(Origin(index, kind_of(event), "bonus"))
                    _say(open_texts, name, (*drafts, path.bonus), origins, drawn)
                    count = counted(index, "commit", name, standing.window, standing.parents, path)
                    cut = not count.agrees and name in ends.get(index, ())
                    if judged is None or index in judged:
                        found.add_window(Skipped("counts", index, CUT, name) if cut else count,
                                         len(standing.window) - 1, len(drafts))
    for text in open_texts.values():
        _end(found, text)
    return found


def last_commits(events: Sequence[e.AnyEvent]) -> dict[int, frozenset[str]]:
    """The commits after which a request ends or the recording does: event -> these requests.

    An engine that stops at a number of tokens or at a stop token may drop the rest of the accepted path there. The last
    token is then a draft, and its state may have more tokens or fewer. An abort before an admission of the same name
    is a preemption, and cuts nothing.
    """
    found, after = dict[int, frozenset[str]](), dict[str, type[e.Event]]()
    for index, event in reversed([*enumerate(events)]):
        names = named(event)
        if isinstance(event, e.Commit):
            found[index] = frozenset(name for name in names if after.get(name, e.Finish) is e.Finish)
        ends = isinstance(event, e.Abort) and not any(after.get(name) is e.Admit for name in names)
        after |= dict.fromkeys(names, e.Finish if ends else type(event))
    return found


def _say(
    texts: dict[str, Text], name: str, tokens: tuple[int, ...], origins: Sequence[Origin],
    drawn: Mapping[str, Sequence[Drawn]],
) -> None:
    text, how = texts[name], drawn.get(name) or (None,) * len(tokens)
    texts[name] = replace(
        text, said=(*text.said, *tokens), origins=(*text.origins, *origins), drawn=(*text.drawn, *how))


def _end(found: Told, text: Text | None) -> None:
    if text is not None and len(text.said) > text.known:
        found.texts.append(text)


def counted(
    event: int, kind: str, name: str, window: tuple[int, ...], parents: tuple[int, ...], path: e.Path
) -> Comparison:
    """Compare the count of a commit: no child of the last accepted node may be the bonus.

    Acceptance would have taken that child, and a token that is drawn after refused drafts is none of them.
    """
    last = path.nodes[-1] if path.nodes else 0
    refused = [node for node in _children(last, parents) if window[node] == path.bonus]
    of = f"accepted {len(path.nodes)} of {len(window) - 1} drafts"
    says = f"{of}, and refused one that is its own bonus, token {path.bonus}: acceptance takes it"
    return Comparison(
        "counts", Tier.IDENTITY, event, kind, PICK, elements=1, worst=float(bool(refused)), allowed=0.0,
        request=name, problem=Problem("differs", says) if refused else None,
    )


def _children(node: int, parents: Sequence[int]) -> Iterator[int]:
    return (child for child, parent in enumerate(parents) if parent == node)
