"""A long run of random traffic, and whether anything was lost, left behind or changed by it."""
