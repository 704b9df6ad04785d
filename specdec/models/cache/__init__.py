"""Keys, values and states of texts, one class for each kind."""
