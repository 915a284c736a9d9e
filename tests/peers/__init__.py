"""Runs of other people's kernels and engines: `make peers`, or `python -m peers` from `tests/`.

`engines/`, `kernels/` and `recordings/` each have a list `ENTRIES` of plain dicts (see `entry.py`); `run.py` runs one,
`environment.py` installs its packages, `__main__.py` writes `fixtures/results/peers.json`. Leaves out: the code of the
peers.
"""
