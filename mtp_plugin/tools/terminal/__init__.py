"""What the command line shows: prompts in, live text, tables, JSON and the doctor's findings."""
