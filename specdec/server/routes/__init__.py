"""What is served at which path."""
