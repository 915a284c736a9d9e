"""Surroundings of what is tested: fakes of packages, memory of rings, second engines."""
