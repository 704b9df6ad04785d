"""What is done to a transformers module, and what of transformers is private."""
