"""How passes are run: padded, ragged, recorded, by snapshots."""
