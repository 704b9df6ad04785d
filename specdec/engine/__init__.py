"""The running set of sequences, and the loop."""
