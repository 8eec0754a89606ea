"""Families of published models: their config.json in our words and back, and the names of their tensors."""
