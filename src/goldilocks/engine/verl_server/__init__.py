"""Our engine as a rollout server of verl."""
