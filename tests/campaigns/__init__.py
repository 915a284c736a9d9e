"""Long runs for developers: each goes on where its last call stopped, and writes a file of `fixtures/results`."""
