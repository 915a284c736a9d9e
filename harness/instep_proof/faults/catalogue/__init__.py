"""One file per family of faults, each a tuple FAULTS and nothing else.

Leaves out: what a fault is (`instep_proof/faults/fault.py`).
"""
