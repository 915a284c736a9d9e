"""Engines, op sets and strategies that are wrong on purpose, each with right ones to compare."""
