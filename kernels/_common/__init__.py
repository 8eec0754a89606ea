"""What several rooms share: Metal headers for tiles, reductions and vector accesses, and Python helpers."""
