"""The choice of the draft length of a step."""
