"""Generated data sets with their graders, and small models to train on them."""
