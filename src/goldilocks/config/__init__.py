"""What a user writes: the keys of the config, checked, and the recipes with their YAML."""
