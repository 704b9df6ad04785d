"""Prompts of every shape as rows of token ids without padding."""
