"""Free-running decoding: prompts in, text out, with the engine's own drafts and its own acceptance.

    decode.py   prompts through an engine, batched as they come, every step timed
    words.py    text to tokens and back
    reread.py   what was decoded, read again by the reference: tokens and states
    speed.py    tokens per second, accepted lengths, step counts
    render.py     all of it for people and as data
    arms.py     the same prompts with a controller of step counts and with fixed ones
    forced.py   what one model decoded, played by another of real size, checked and timed

Leaves out: traces from files (`instep.replay` replays those).
"""
