"""Traces: the file, the rules, the policy and the one scheduler.

Leaves out: running them (`instep.replay`).
"""
