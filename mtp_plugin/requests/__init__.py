"""Request options, request states and stop rules."""
