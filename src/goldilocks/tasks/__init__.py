"""Data sets made on the spot, their rewards, and a tiny model to train on them."""
