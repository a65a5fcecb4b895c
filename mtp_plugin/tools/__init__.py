"""What the commands do: generate, parity, doctor, draft-vocab, tune."""
