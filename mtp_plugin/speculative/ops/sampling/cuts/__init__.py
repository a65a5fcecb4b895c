"""Draws under top-k, top-p and min-p on the device."""
