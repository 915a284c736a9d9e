"""Kernels that take each row by itself: norms, rotary angles, moves, and element by element."""
