"""Surroundings of what is tested: fakes of packages, memory of rings, a GPU in simulated time, second engines."""
