"""How passes are run: padded, ragged, compiled, by snapshots."""
