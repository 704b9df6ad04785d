"""Summaries of texts of any length."""
