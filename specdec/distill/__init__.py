"""Trains a draft for any target (`specdec distill`)."""
