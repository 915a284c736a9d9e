"""Long runs for developers. A later call of one continues, and writes its file of `fixtures/results`."""
