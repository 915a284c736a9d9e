"""Fuzzing: drawn sequences of legal events through both sides, and the smallest one on which they part.

Leaves out: what is legal (`instep.trace.event_rules`) and what is compared (`instep.checks`).
"""
