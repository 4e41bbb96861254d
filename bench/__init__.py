"""Benchmarks: each prints one line; fixed seeds, warm-up, median of rounds. `make bench`."""
