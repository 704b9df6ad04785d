"""Models whose weights are distributed over several processes."""
