"""GGUF files, written by the tests and read by the package."""
