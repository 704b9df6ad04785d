"""Options: frozen, without torch, filled by keyword arguments, GenerationConfig, YAML and flags."""
