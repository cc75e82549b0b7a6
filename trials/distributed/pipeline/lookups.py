"""The lookups of a pipeline: each of its ranks looks up a part of its examples, as all ranks hold the tables, and
the first stage is given all.

So tables are held and looked up over all ranks as without pipelines, and their engines know nothing of stages.
Gradients go the way back.

Shapes: B examples of the pipeline, P of this rank's part, V numbers of all embeddings of an example; T categorical
tables, G growing ones among them, K numeric inputs, N numbers with buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.batch import FeatureBatch, Keys
from trials.ranks import rank_slice


class PipelineLookups:
    """Where the ranks of one pipeline stand, and what they send each other around a step."""

    def __init__(self, group: dist.ProcessGroup, growing_bags: Sequence[int]) -> None:
        """Takes the ranks of the pipeline, first stage first, and the places of growing tables among multi-hot
        ones."""
        self._group, self._growing_bags = group, growing_bags
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def part(self, examples: int) -> slice:
        """Returns which of the pipeline's examples this rank looks up: all of them where there are fewer than
        ranks."""
        if examples < self._ranks:
            return slice(0, examples)
        return rank_slice(examples, self._rank, self._ranks)

    def features_of(self, features: FeatureBatch) -> FeatureBatch:
        """Returns this rank's part of the pipeline's inputs."""
        part = self.part(features.size)
        return _part_of(features, part.start, part.stop, self._growing_bags)

    @torch.no_grad()
    def gather(self, embeddings: Sequence[Tensor], examples: int) -> tuple[Tensor, ...]:
        """Returns the embeddings of all of the pipeline's examples on the first stage, nothing on others; a
        collective."""
        if examples < self._ranks:
            return () if self._rank else tuple(embeddings)
        return tuple(whole for e in embeddings if (whole := self._gathered(e.detach(), examples)) is not None)

    @torch.no_grad()
    def scatter_gradients(self, whole: Sequence[Tensor], embeddings: Sequence[Tensor], examples: int) -> None:
        """Gives the embeddings that this rank looked up their gradients, from those of the first stage, which are
        freed; a collective.

        Each is multiplied by the number of the pipeline's ranks: engines divide by that of all ranks, where a
        pipeline's gradients are averaged over pipelines alone.
        """
        assert examples >= self._ranks
        longest = -(-examples // self._ranks)
        for place, e in enumerate(embeddings):
            received, parts = e.new_empty(longest, *e.shape[1:]), None
            if not self._rank:
                gradient = whole[place].grad
                assert gradient is not None
                gradient.mul_(self._ranks)
                # of parts that are an example shorter a rank takes one no notice of; the last one is the longest
                starts = [rank_slice(examples, rank, self._ranks).start for rank in range(self._ranks)]
                parts = [gradient[start : start + longest] for start in starts]
                whole[place].grad = None
            dist.scatter(received, parts, group=self._group, group_src=0)
            e.grad = received[: len(e)]

    def _gathered(self, part: Tensor, examples: int) -> Tensor | None:
        """Returns one tensor's rows of all ranks on the first, None on others."""
        longest, sent = -(-examples // self._ranks), part.contiguous()
        if len(part) < longest:
            sent = torch.cat((part, part[:1]))
        if self._rank:
            dist.gather(sent, None, group=self._group, group_dst=0)
            return None
        whole = part.new_empty(self._ranks, longest, *part.shape[1:])
        dist.gather(sent, list(whole.unbind()), group=self._group, group_dst=0)
        if longest * self._ranks == examples:
            return whole.flatten(0, 1)
        slices = [rank_slice(examples, rank, self._ranks) for rank in range(self._ranks)]
        return torch.cat([rows[: s.stop - s.start] for rows, s in zip(whole, slices, strict=True)])


def _part_of(features: FeatureBatch, start: int, stop: int, growing_bags: Sequence[int]) -> FeatureBatch:
    """Returns the inputs of examples that lie one after another."""
    spans = [_span(ids, offsets_B, start, stop) for ids, offsets_B in features.bags]
    keys = None
    if features.keys is not None:
        of_growing = zip(features.keys.bags, (spans[place] for place in growing_bags), strict=True)
        keys = Keys(features.keys.columns_BG[start:stop], tuple(keys[span] for keys, span in of_growing))
    return FeatureBatch(
        ids_BT=features.ids_BT[start:stop],
        bags=tuple(
            (ids[span], offsets_B[start:stop] - span.start)
            for (ids, offsets_B), span in zip(features.bags, spans, strict=True)
        ),
        numeric_BK=features.numeric_BK[start:stop],
        share_BN=None if features.share_BN is None else features.share_BN[start:stop],
        keys=keys,
    )


def _span(ids: Tensor, offsets_B: Tensor, start: int, stop: int) -> slice:
    """Returns where the ids of these examples lie among all."""
    first = int(offsets_B[start]) if start < len(offsets_B) else len(ids)
    return slice(first, int(offsets_B[stop]) if stop < len(offsets_B) else len(ids))
