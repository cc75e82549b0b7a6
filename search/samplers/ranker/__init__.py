"""An ensemble of rankers trained on pairs of candidates, our own (`search.samplers.ranker`).

Its settings were chosen together on the made-up function of benchmarks/search/samplers_on_surrogate.py
(`--synthetic`), 2026-11-21, 2 cores; if docs/log.md has a figure for one of them, that setting cites it, and the
others are called assumptions. With all of them the ranker was compared with other samplers on really trained
candidates (docs/benchmarks/samplers.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from search.samplers.context import SamplerContext


def make(seed: int, context: SamplerContext) -> BaseSampler:
    """A sampler of whole points; axes that a start point leaves open are those of a proposal."""
    from optuna.samplers import RandomSampler

    from search.samplers.ranker.propose import propose

    class Ranker(RandomSampler):
        def sample_relative(self, *_: object) -> dict[str, object]:
            return dict(context.pricer.space.for_optuna(propose(context, seed)))

    return Ranker(seed=seed)
