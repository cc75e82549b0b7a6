"""An ensemble of rankers trained on pairs of candidates, our own sampler.

Its settings were chosen together on the made-up function of benchmarks/search/samplers_on_surrogate.py
(`--synthetic`), 2026-11-21, 2 cores; if docs/log.md has a figure for one of them, that setting cites it, and the
others are called assumptions. With all of them the ranker was compared with other samplers on really trained
candidates (docs/benchmarks/samplers.md).
"""
