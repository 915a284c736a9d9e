"""How tests run what they test: commands, processes, a browser, planted edits, and the part for `make test`."""
