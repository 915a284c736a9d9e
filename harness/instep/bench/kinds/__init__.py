"""The kinds of work that the benchmark knows, one file each with a value `KIND`.

Leaves out: their table (`bench/__init__.py`).
"""
