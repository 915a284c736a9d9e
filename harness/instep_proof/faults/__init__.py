"""Planted faults: the proof that the harness detects errors.

Leaves out: the faults (`catalogue/`).
"""
