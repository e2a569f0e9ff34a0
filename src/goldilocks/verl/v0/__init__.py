"""verl's V0 trainer, and the names of the documents."""
