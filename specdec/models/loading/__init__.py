"""From a name or path to a model on its devices."""
