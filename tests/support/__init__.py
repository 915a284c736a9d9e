"""What several test files share. Leaves out: anything that asserts."""
