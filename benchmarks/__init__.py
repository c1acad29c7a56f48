"""Benchmarks: `python -m benchmarks [NAME ...]` runs them and writes benchmarks/results/NAME.json."""
