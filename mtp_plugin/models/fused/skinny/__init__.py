"""Products of few rows with a large weight, which is read once at the speed of memory."""
