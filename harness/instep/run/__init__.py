"""Replay of one trace through both sides: the sides, the lock-step loop, and the object that a command builds.

Leaves out: the checks (`instep.checks`) and the report (`instep.report`).
"""
