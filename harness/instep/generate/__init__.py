"""Free-running decoding: prompts in, text out, with the engine's own drafts and its own acceptance.

    decode.py      prompts through an engine, batched as they come, every step timed; its speed
    tokenizer.py   text to tokens and back
    text_check.py  what was decoded, read again by the reference: tokens and states
    render.py      all of it for people and as data

Leaves out: traces from files (`instep.run` replays those).
"""
