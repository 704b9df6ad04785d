"""From logits to tokens, independent of models."""
