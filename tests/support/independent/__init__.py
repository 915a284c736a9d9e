"""Computations that share no code with what they are compared with."""
