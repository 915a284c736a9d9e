"""Kernels compiled without a GPU, and kernels and processes for tests on one."""
