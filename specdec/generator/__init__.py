"""The front door: inputs become a request, and a request a result."""
