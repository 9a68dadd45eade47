"""Measurements of the product on this computer: `python -m benchmarks`, or one module at a time."""
