"""Adapters to real engines."""
