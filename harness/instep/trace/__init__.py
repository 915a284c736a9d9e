"""Traces: the file, the event rules, the policy and the scheduler.

Leaves out: running them (`instep.run`).
"""
