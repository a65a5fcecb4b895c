"""Commands around the engine: benchmarks, parity, the terminal."""
