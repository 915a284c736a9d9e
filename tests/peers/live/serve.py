"""`python -m peers.live.serve`: run the engine of one case in this process and its children, and write the answers.

`peers.live.run` starts it under `instep attach`. Leaves out: the recording, and time limits.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from .cases import SUFFIX, Request, Wave, arguments, by_name, prompts

ANSWERS = "answers.jsonl"


def serve(engine: Any, waves: Sequence[Wave], out: TextIO) -> None:
    """Generate the answers of all waves, one wave after the other; each answer is a line of JSON."""
    given, said = prompts(), dict[int, list[int]]()  # the last answer to a prompt
    for wave in waves:
        texts = {one.name: given[one.prompt] + (said[one.prompt][: one.again] + SUFFIX if one.again else [])
                 for one in wave}  # fmt: skip
        begun = time.monotonic()
        found = engine.loop.run_until_complete(answered(engine, wave, texts))
        print(f"{len(wave)} requests in {time.monotonic() - begun:.1f} s", flush=True)
        for one in wave:
            tokens, cached = found[one.name]
            said[one.prompt] = tokens
            line = {"name": one.name, "prompt": texts[one.name], "tokens": tokens, "cached": cached}
            out.write(json.dumps(line) + "\n")
        out.flush()


async def answered(engine: Any, wave: Wave, texts: dict[str, list[int]]) -> dict[str, tuple[list[int], int]]:
    """The answers of one wave: name -> tokens, and how many tokens of its prompt came from the prefix cache."""
    lead, waiting = Lead(), [one for one in wave if one.after]
    tasks = [asyncio.ensure_future(_one(engine, one, texts[one.name], lead if one is wave[0] else None))
             for one in wave if not one.after]  # fmt: skip
    for one in sorted(waiting, key=lambda request: request.after):
        while lead.tokens < one.after:
            await asyncio.sleep(0.002)
        tasks.append(asyncio.ensure_future(_one(engine, one, texts[one.name], None)))
    done = await asyncio.gather(*tasks)
    return {name: (tokens, cached) for name, tokens, cached in done}


class Lead:
    """The number of tokens of a wave's first answer so far."""

    tokens = 0


async def _one(engine: Any, one: Request, text: list[int], lead: Lead | None) -> tuple[str, list[int], int]:
    sampling = {"temperature": 0, "max_new_tokens": one.tokens, "ignore_eos": True}
    named = dict(input_ids=text, sampling_params=sampling, rid=one.name)
    if lead is None:
        last = await engine.async_generate(**named)
        tokens = list(last["output_ids"])
    else:
        try:
            tokens = []
            async for last in await engine.async_generate(**named, stream=True):
                part, count = list(last["output_ids"]), last["meta_info"]["completion_tokens"]
                tokens = part if len(part) >= count else tokens + part  # all so far, or only the new ones
                lead.tokens = count
        finally:
            lead.tokens = sys.maxsize  # no request waits for an answer that is over
    return one.name, tokens, int(last["meta_info"].get("cached_tokens", 0))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.serve", description="Run the engine of one case.")
    parser.add_argument("files", type=Path, help="the unpacked bundle")
    parser.add_argument("case", help="its name")
    parser.add_argument("out", type=Path, help="a folder for the answers")
    parser.add_argument("--port", type=int, default=31000)
    options = parser.parse_args(given)
    import sglang  # type: ignore[import-not-found]

    (case,) = by_name(options.case)
    begun = time.monotonic()
    engine = sglang.Engine(**arguments(case, options.files, options.out, options.port))
    print(f"engine up in {time.monotonic() - begun:.1f} s", flush=True)
    with open(options.out / ANSWERS, "w") as lines:
        serve(engine, case.waves, lines)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
