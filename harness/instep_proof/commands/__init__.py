"""The commands of this package, each implemented in the file of its name."""
