"""specdec inside of other programs."""
