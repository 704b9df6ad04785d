"""Batches and servers on a Ray cluster."""
