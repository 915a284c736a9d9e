"""Fuzzing: random sequences of legal events run through both sides; the smallest one on which they differ is kept.

Leaves out: what is legal (`instep.trace.event_rules`) and what is compared (`instep.checks`).
"""
