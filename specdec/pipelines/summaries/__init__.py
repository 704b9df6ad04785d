"""Long texts to short ones."""
