"""The engine under test: whose exception it is, what it declares, and engines that are driven through callbacks."""
