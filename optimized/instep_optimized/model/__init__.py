"""The model as calls of ops: one frozen object per layer, dispatched by kind.

Leaves out: arithmetic (`ops/`) and addresses (`commit/`, `batch.py`).
"""
