"""What stands between verl's V0 training loop and the collector."""
