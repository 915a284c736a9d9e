"""Kernels that process each row separately: norms, rotary angles, moves, and elementwise ops."""
