"""The models that come with the package, and the texts that they were not made of."""
