"""``goldilocks train``: from a recipe to a running trainer, on a laptop or a cluster."""
