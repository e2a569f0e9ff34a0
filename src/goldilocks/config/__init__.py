"""What a user writes: settings, recipes with their YAML, and keys with dots."""
