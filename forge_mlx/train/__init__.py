"""The trainer: config, loop, checkpoints, metrics, report. The command is ``python -m forge_mlx.train``."""
