"""What every trainer does between "I need a batch" and "here it is", whoever generates."""
