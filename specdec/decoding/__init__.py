"""From logits to tokens; knows no model."""
