"""Acceptance statistics and alarms."""
