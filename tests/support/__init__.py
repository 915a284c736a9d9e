"""Helpers that several test files share. Leaves out: assertions."""
