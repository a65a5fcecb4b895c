"""Commands of the embedded executor: generate, parity, doctor, bench."""
