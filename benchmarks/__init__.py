"""What the figures in docs/benchmarks were measured with; README.md lists the scripts by their question."""
