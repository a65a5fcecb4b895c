"""How many drafts a step makes."""
