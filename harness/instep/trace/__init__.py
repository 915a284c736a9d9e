"""Traces: the file, the law, the policy and the one scheduler.

Leaves out: running them (`instep.rig`).
"""
