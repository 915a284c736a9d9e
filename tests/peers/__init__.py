"""Other people's kernels and engines, really run: `make peers`, or `python -m peers` from `tests/`.

`engines/`, `kernels/` and `recordings/` each have a list `ENTRIES` of plain dicts (see `entry.py`); `run.py` runs one,
`environment.py` has what they need, `__main__.py` writes `fixtures/results/peers.json`. Leaves out: anything that a
peer's package contains.
"""
