"""One trace through both sides: the sides, the lock-step loop, and the replay that a command builds.

Leaves out: what is compared (`instep.checks`) and how it is told (`instep.report`).
"""
