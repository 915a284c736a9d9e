"""The kinds of work of the benchmark, one file each with a value `KIND`.

Leaves out: their table (`instep_speed/bench/__init__.py`).
"""
