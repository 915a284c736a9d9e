"""Does the checker bite? Planted faults, and engines that are slightly wrong or differently right."""
