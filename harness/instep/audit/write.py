"""Write a recording of an engine for `instep audit`: its requests, forwards, tokens and accepted drafts.

This file needs nothing but the standard library and safetensors. Paste it into an engine, or import it
(`instep.audit.write`), and call `forward` where the tokens of a step are known:

    recording = Recording("/tmp/recording", engine="my engine 1.2", model="/models/mine", dtype="bfloat16")
    recording.admit("r1", prompt)                                   # when a request arrives
    recording.forward(requests, counts, positions, tokens, sampled)  # after every forward of the target
    recording.accepted({"r1": [12, 77, 3]})                         # after acceptance, if `forward` had None
    recording.finish("r1")
    recording.close()

Every line is written immediately, and a tensor file before its line. So the recording of an engine that dies can be
read up to that event. For a request that samples, `admit` gets its temperature, top-k and top-p, and `forward` gets the
uniforms. If you do not have them, `admit` gets `given=True`: then all is judged but its tokens. In vLLM's V1 runner,
requests are `input_batch.req_ids`, counts the scheduled tokens, positions and tokens the flat inputs, and sampled the
returned list per request. In SGLang they are `rids`, `extend_lens` (a window's width in a verify), `positions`,
`input_ids`, and the accepted tokens with the bonus after `verify`.
Leaves out: draft heads, as their proposals are visible as windows.
"""

import hashlib
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

SCHEMA = 1
READ_AT_ONCE = 1 << 20  # bytes


# Prefixes of names in a multimodal checkpoint, and those of a text-only one.
WRAPPED = (
    ("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
)
VISUAL = ("visual.", "model.visual.")


def digest(model: str | os.PathLike[str]) -> str:
    """sha256 of the weights of a checkpoint: name, dtype, shape and bytes of each tensor, in the order of names.

    So config.json, the division into files, visual weights and the names of a multimodal wrapping do not count. Reads
    every byte.
    """
    folder, total = Path(model), hashlib.sha256()
    index = folder / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [
        "model.safetensors"
    ]
    places = dict[str, tuple[Path, int, dict[str, Any]]]()
    for file in (folder / name for name in names):
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        for name, at in header.items():
            if name != "__metadata__" and not name.startswith(VISUAL):
                wrapped = (plain + name[len(long):] for long, plain in WRAPPED if name.startswith(long))
                places[next(wrapped, name)] = (file, 8 + size, at)
    for name, (file, data, at) in sorted(places.items()):
        total.update(json.dumps([name, at["dtype"], at["shape"]]).encode())
        begin, end = at["data_offsets"]
        with open(file, "rb") as opened:
            opened.seek(data + begin)
            while part := opened.read(min(READ_AT_ONCE, end - begin)):
                total.update(part)
                begin += len(part)
    return total.hexdigest()


class Recording:
    """An open recording.

    model   the checkpoint's directory, whose digest and config.json are recorded, or the digest; None: the audit
            cannot check it
    dtype   of hidden rows and KV; state: storage dtype of recurrent states
    rounds, products, layout   other roundings, and the order of axes of recorded states (docs/audit-record.md)
    controller  of the step count: {"dialect": "sglang-0.5.14", "file": {..}, "captured": [1, 2, 4]}; None: not judged
    num_steps   the initial step count;  overlap: whether a round is launched before the last one's results are known
    selected    whether states are recorded at some events only. A prefix hit is then two forwards, the tokens from the
                cache and the others, so that an audit knows where the cached state was continued
    rank, ranks, run  of a tensor-parallel engine: every rank has a recording, and they lie next to each other in
                `directory`. run is a word that all ranks share, such as the time at which rank 0 began
    shards      name -> [heads, width] of each segment, for "conv" and "state", of the whole model: states of a rank are
                its parts. None: as SGLang and vLLM split q, k and v
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, engine: str, model: str | os.PathLike[str] | None = None,
        dtype: str = "float32", state: str = "float32", rounds: dict[str, str] | None = None,
        products: dict[str, dict[str, Any]] | None = None, layout: str = "KV",
        controller: dict[str, Any] | None = None, num_steps: int | None = None, overlap: bool = False,
        selected: bool = False, rank: int | None = None, ranks: int | None = None, run: str | None = None,
        shards: dict[str, list[list[int]]] | None = None,
    ) -> None:
        self._selected = selected
        if (rank is None) != (ranks is None) or (rank is None) != (run is None):
            raise ValueError("rank, ranks and run belong together: a recording has all of them, or none")
        self.directory = Path(directory) if rank is None else Path(directory) / f"rank-{rank}"
        (self.directory / "tensors").mkdir(parents=True)
        known, config = None if model is None else str(model), None
        if model is not None and os.path.isdir(model):
            known, config = digest(model), json.loads((Path(model) / "config.json").read_text())
        self._stated: dict[str, Any] = {
            "schema": SCHEMA, "engine": engine, "weights": known, "config": config, "dtype": dtype, "state": state,
            "rounds": rounds or {}, "products": products or {}, "layout": layout, "shows": [], "controller": controller,
            "num_steps": num_steps, "overlap": overlap,
        } | ({} if rank is None else {"rank": rank, "ranks": ranks, "run": run, "shards": shards or {}})
        self._lock, self._opened = threading.RLock(), dict[str, int]()
        self._state()
        self._sha256, self._events, self._steps = hashlib.sha256(), 0, num_steps
        self._chosen: dict[str, tuple[dict[str, Any] | None, bool]] = {}  # the last two arguments of `admit`
        self._prompt: dict[str, list[int]] = {}
        self._told: dict[str, list[int]] = {}  # prompt and all generated tokens, the root last
        self._length: dict[str, int] = {}
        self._flying: dict[str, list[int]] = {}  # windows that were verified and not committed
        self._single = list[str]()  # requests of `_held` with a window of one token
        self._held: tuple[list[dict[str, Any]], dict[str, Any]] | None = None  # rows and tensors, until `accepted`

    def admit(
        self, request: str, prompt: Any, sampling: dict[str, Any] | None = None, given: bool = False
    ) -> None:
        """Record a new request. A name may be used again when its request is over.

        sampling  how it draws its tokens: temperature, and top_k and top_p if there are any; None: argmax
        given     its tokens are not judged: it samples with unknown uniforms, or has penalties of tokens, for example
        """
        tokens = _ints(prompt)
        self._chosen[request] = sampling, given
        self._prompt[request], self._told[request], self._length[request] = tokens, list(tokens), 0
        self._event({"event": "admit", "request": request, "prompt": tokens} | (
            {} if sampling is None else {"sampling": sampling}) | ({"given": True} if given else {}))

    def forward(
        self, requests: Any, counts: Any, positions: Any, tokens: Any, sampled: Any, logits: Any = None,
        final: Any = None, uniforms: Any = None,
    ) -> None:
        """Record one forward of the target. Call it after the forward.

        requests, counts   names and numbers of tokens of the batch's requests, in batch order
        positions, tokens  of all requests, concatenated
        sampled            per request its new tokens: none within a prompt, one after the whole prompt or a decode, the
                           accepted drafts and the bonus after a window; None: `accepted` gets them. A window may
                           be one token: that is a round of 0 steps
        logits             all rows of a window, the last row of others: [rows, vocab], or request -> [rows, vocab]
        final              the rows that the output matrix read, in the same way
        uniforms           request -> its uniforms, if it samples and chooses a token: for a window one per token and
                           the final one, else a single one. Multiples of 2**-24, like fp32 random numbers
        """
        if self._held is not None:
            raise ValueError(f"requests {', '.join(self._single)}: a forward, but the last one was not accepted")
        counts, at, ids, begin = _ints(counts), _ints(positions), _ints(tokens), 0
        rows, windows, chosen = list[dict[str, Any]](), dict[str, list[int]](), dict[str, list[int]]()
        reused = set[str]()  # requests whose first tokens came from a prefix cache: one row with the tokens that ran
        cached = list[dict[str, Any]]()
        for number, (request, count) in enumerate(zip(requests, counts, strict=True)):
            first, ran = at[begin], ids[begin : begin + count]
            begin += count
            said = None if sampled is None or sampled[number] is None else _ints(sampled[number])
            if first == 0 and self._length[request]:
                self._again(request)
            elif first > self._length[request] and not self._length[request] and self._selected:
                cached.append(self._row(request, 0, self._prompt[request][:first], None))
            elif first > self._length[request] and not self._length[request]:
                first, ran = 0, self._prompt[request][: first + count]
                reused.add(request)
            rows.append(self._row(request, first, ran, said))
            if uniforms is not None and request in uniforms:
                rows[-1]["uniforms"] = [float(u) for u in uniforms[request]]
            if rows[-1]["kind"] == "verify":
                windows[request] = ran
                if said is not None:
                    chosen[request] = said
        if not rows:
            return
        if cached:
            self._event({"event": "forward", "rows": cached})
        if windows or self._single:
            self._put_in_force(max((len(window) for window in windows.values()), default=1) - 1)
        if windows:
            self._draft(windows)
        kinds = {"logits": logits, "final": final}
        shown = {
            f"{name}.{request}": rows_of
            for name, tensor in kinds.items() if tensor is not None
            for request, rows_of in _parted(tensor, rows, counts, windows, reused).items()
        }
        if self._single:
            self._held = rows, shown
        else:
            self._event({"event": "forward", "rows": rows}, shown)
        self._flying |= windows
        if windows and chosen.keys() == windows.keys() and not self._single:
            self.accepted(chosen)

    def accepted(self, said: dict[str, Any]) -> None:
        """Record acceptance: request -> its accepted drafts and the bonus, for every verified window."""
        if self._held is not None:
            rows, shown = self._held
            roots = {request: _ints(said[request]) for request in self._single}
            for request, root in roots.items():
                if len(root) != 1:
                    raise ValueError(f"request {request}: {len(root)} tokens, but its window had no draft")
                self._told[request] += root
            self._single, self._held = [], None
            rows = [row | {"root": roots[name][0]} if (name := row["request"]) in roots else row for row in rows]
            if rows:
                self._event({"event": "forward", "rows": rows}, shown)
        if not self._flying:
            return
        paths = []
        for request in self._flying:
            tokens = _ints(said[request])
            paths.append({"nodes": list(range(1, len(tokens))), "bonus": tokens[-1]})
            drafts = self._flying[request][1 : len(tokens)]
            if drafts != tokens[:-1]:
                raise ValueError(f"request {request}: accepted {tokens[:-1]}, but its drafts were {drafts}")
            self._told[request] += tokens
            self._length[request] += len(tokens)
        names, self._flying = list(self._flying), {}
        self._event({"event": "commit", "requests": names, "accepted": paths})

    def states(self, request: str, layers: dict[int, tuple[Any, Any]], slot: int | None = None) -> None:
        """Record a request's memory: layer -> conv window [C, W-1], oldest first, and state [HV, K, V].

        Call it after the event that wrote the memory. With layout VK the state is [HV, V, K]. slot: the number of the
        engine's slot, which findings then name.
        """
        found = {f"{name}.{request}.{layer}": tensor for layer, pair in layers.items()
                 for name, tensor in zip(("conv", "state"), pair, strict=True)}  # fmt: skip
        if slot is not None and layers:
            found[f"slot.{request}"] = next(iter(found.values())).new_zeros(1).long() + slot
        self._event(None, found)

    def add(self, event: int, tensors: dict[str, Any]) -> None:
        """Add named tensors to an event that was recorded before, such as "state.r1.0" or "logits.r1".

        Another thread may call this, for an event to which no one else adds tensors.
        """
        self._event(None, tensors, event)

    def batch(
        self, event: int, size: int, rows: dict[str, int], slots: dict[str, int],
        rounds: list[dict[str, Any]] | None = None,
    ) -> None:
        """Record where the engine had the requests of a forward: its batch size, their batch rows and their slots.

        rounds: what the controller of the step count saw since the last batch: {"launch": 7, "processed": 8, "steps":
        3, "accepted": [0, 3]} for each round of the engine, of all its requests. An engine that counts prompts, too,
        adds "scheduled", the number of all rows. No row shows the step count: "steps" is None (`Round` of
        `recording.py`)
        """
        known = {"event": event, "batch": size, "rows": rows, "slots": slots} | ({"rounds": rounds} if rounds else {})
        self._append("batches.jsonl", json.dumps(known, separators=(",", ":")).encode() + b"\n")

    def note(self, **facts: Any) -> None:
        """State what an attached recorder recorded of each event, and what it left out."""
        self._state(attached=facts)

    @property
    def events(self) -> int:
        """The number of events so far."""
        return self._events

    def knows(self, request: str) -> bool:
        """Whether the request was admitted and is not over."""
        return request in self._length

    def retract(self, request: str) -> None:
        """Record that a request loses its memory. To compute it again, admit it with its text so far."""
        self._event({"event": "abort", "request": request})
        self._forget(request)

    def finish(self, request: str) -> None:
        """Record that a request ended or was stopped."""
        if request in self._single and self._held is not None:  # its window never had a result: leave its row out
            rows, shown = self._held
            self._held = ([row for row in rows if row["request"] != request],
                          {name: one for name, one in shown.items() if name.partition(".")[2] != request})
            self._single.remove(request)
        over = self._length[request] >= len(self._prompt[request]) and request not in self._flying
        self._event({"event": "finish" if over else "abort", "request": request})
        self._forget(request)

    def close(self) -> None:
        """Close the recording when the engine ends."""
        self._state(events=self._events, sha256=self._sha256.hexdigest())

    def _row(self, request: str, first: int, ran: list[int], said: list[int] | None) -> dict[str, Any]:
        """One row of a forward in the grammar of a trace. Advances the length, except for a window."""
        length, told = self._length[request], self._told[request]
        prompt = len(self._prompt[request])
        if first != length:
            raise ValueError(f"request {request}: {len(ran)} tokens at position {first}, but {length} are committed")
        if length >= prompt and len(ran) > 1:
            return {"request": request, "kind": "verify"}
        self._length[request] += len(ran)
        row: dict[str, Any] = {"request": request, "kind": "prefill" if length < prompt else "decode"}
        if length < prompt:
            row["tokens"] = len(ran)
        if length >= prompt and said is None:
            self._single.append(request)
        elif self._length[request] >= prompt:
            if not said:
                raise ValueError(f"request {request}: no token for the position after {first + len(ran) - 1}")
            row["root"] = said[-1]
            told.append(said[-1])
        return row

    def _put_in_force(self, steps: int) -> None:
        if steps != self._steps:
            self._steps = steps
            self._event({"event": "set_num_steps", "num_steps": steps})

    def _draft(self, windows: dict[str, list[int]]) -> None:
        steps = max(len(window) for window in windows.values()) - 1
        event: dict[str, Any] = {"event": "draft", "requests": list(windows),
                                 "picks": [window[1:] for window in windows.values()]}
        if any(len(window) - 1 != steps for window in windows.values()):
            event["parents"] = [list(range(len(window) - 1)) for window in windows.values()]
        self._event(event)

    def _again(self, request: str) -> None:
        """Restart a request that was preempted and is computed again: its text so far becomes its prompt."""
        self._event({"event": "abort", "request": request})
        self._flying.pop(request, None)
        self.admit(request, self._told[request], *self._chosen[request])

    def _forget(self, request: str) -> None:
        for kept in (self._prompt, self._told, self._length, self._flying):
            kept.pop(request, None)

    def _event(
        self, event: dict[str, Any] | None, shown: dict[str, Any] | None = None, number: int | None = None
    ) -> None:
        """Write a line after its tensors. event None: write more tensors for event `number`, or for the last one."""
        if event is not None or number is None:
            number = self._events if event is not None else self._events - 1
        if shown:
            from safetensors.torch import load_file, save_file

            file = self.directory / "tensors" / f"{number:06d}.safetensors"
            kept = load_file(file) if event is None and file.exists() else {}
            aside = file.with_suffix(".part")
            save_file(kept | {name: one.detach().cpu().contiguous() for name, one in shown.items()}, aside)
            os.replace(aside, file)
            kinds = {"states" if name[:5] in ("conv.", "state", "slot.") else name.partition(".")[0] for name in shown}
            with self._lock:
                if not kinds <= set(self._stated["shows"]):
                    self._state(shows=sorted(kinds | set(self._stated["shows"])))
        if event is not None:
            if self._stated.get("events") is not None:  # it was closed, and continues now
                self._state(events=None)
            line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
            self._append("events.jsonl", line)
            self._sha256.update(line)
            self._events += 1

    def _append(self, name: str, line: bytes) -> None:
        """Write a line. The file stays open, since opening it takes longer than the write."""
        if name not in self._opened:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._opened[name] = opened = os.open(self.directory / name, flags, 0o644)
            weakref.finalize(self, os.close, opened)
        os.write(self._opened[name], line)

    def _state(self, **facts: Any) -> None:
        """Write recording.json with these facts; None takes one out."""
        with self._lock:
            self._stated |= facts
            for name in [name for name, fact in facts.items() if fact is None]:
                del self._stated[name]
            aside = self.directory / "recording.json.part"
            aside.write_text(json.dumps(self._stated, indent=1) + "\n")
            os.replace(aside, self.directory / "recording.json")


def _ints(values: Any) -> list[int]:
    """The integers of a list, or of a tensor on any device."""
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def _parted(
    tensor: Any, rows: list[dict[str, Any]], counts: list[int], windows: dict[str, list[int]], reused: set[str]
) -> dict[str, Any]:
    """Rows by request.

    The tensor may have a row for every token, or only the rows that the output matrix reads: all of a window and the
    last one of others, with or without unfinished prompts. For a reused prompt only the last row is kept.
    """
    if isinstance(tensor, dict):
        return {name: rows_of[-1:] if name in reused else rows_of for name, rows_of in tensor.items()}
    asked = {row["request"]: len(windows.get(row["request"], (0,))) for row in rows}
    ended = {row["request"]: asked[row["request"]] for row in rows if row["kind"] != "prefill" or "root" in row}
    for sizes in (dict(zip(asked, counts, strict=True)), asked, ended):
        if len(tensor) == sum(sizes.values()):
            parts = zip(sizes, tensor.split(list(sizes.values())), strict=True)
            return _parted(dict(parts), rows, counts, windows, reused)
    raise ValueError(f"{len(tensor)} rows, but the batch has {sum(counts)}, of which {sum(asked.values())} are read")
