"""Rows in the TransferQueue, from the answer to the checkpoint."""
