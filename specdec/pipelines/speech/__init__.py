"""Recordings to text."""
