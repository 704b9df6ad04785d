"""Models whose weights lie on several processes."""
