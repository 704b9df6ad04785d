"""Drafts for any target: specdec distill."""
