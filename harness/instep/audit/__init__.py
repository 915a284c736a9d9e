"""Judge a recording of an engine that ran under its own scheduler: its tokens, accepted drafts, rows and states.

`write.py` is the only file that an engine needs. Leaves out: engines that serve given events (`instep replay`).
"""
