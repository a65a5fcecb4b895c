"""The rotary embedding of queries and keys where they lie, with the norm of each head in front."""
