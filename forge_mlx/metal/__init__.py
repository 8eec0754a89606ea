"""How a Metal kernel runs: sources, engines and the emulator. Knows MLX; knows no op."""
