"""Every function of another package that is replaced."""
