"""What depends on transformers' internals, and what is done to its modules."""
