"""Checkpoints in and out of other layouts."""
