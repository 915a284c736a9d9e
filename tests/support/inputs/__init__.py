"""Inputs of tests: checkpoints, traces, recordings, contexts, and events for engines."""
