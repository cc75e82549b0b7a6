"""Collectives by the alpha-beta model, seconds = alpha + beta x bytes, over NVLink in hosts and a network between.

The formulas are NCCL's own model (src/graph/tuning.cc, `ncclTopoTuneModel`; bus-bandwidth factors in nccl-tests,
doc/PERFORMANCE.md). A ring over n ranks moves (n-1)/n of the tensor past each rank in n-1 steps (all-gather,
reduce-scatter) or twice that (all-reduce); all-reduce takes a tree where its fewer steps win. A ring that leaves
the host crosses the network once per host, and NCCL runs one ring for each network card: with a card for each of g
ranks per host, g cards carry it together, which NVLink may bound instead. All-to-all sends (n-g)/n of its bytes
over a rank's own card, the rest over NVLink at the same time.

As in NCCL, a collective takes the quicker of two protocols: Simple has all the bandwidth, LL128 shorter hops. NCCL
has LL128 between GPUs that NVLink joins; links that were measured are taken as they are, whatever they ran.

Left out: LL (below some 100 KB), the most that a channel carries (at 8 channels it takes a seventh from trees
between A100), corrections for trees at medium sizes, congestion, in-network reduction, NVLink SHARP.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from trials.cluster.cluster import Cluster, Link
from trials.planner.device_constants import (
    BUCKET_BYTES,
    BUCKET_LATENCY_SHARE,
    COLLECTIVE_SECONDS,
    LL128_RING_HOPS,
    LL128_SECONDS,
    LL128_SHARE,
    LL128_SHARE_ALONE,
    LL128_TREE_HOPS,
    LL128_TREE_SHARES,
    NETWORK_SHARE,
    NVLINK_SHARE,
    PCIE_BANDWIDTH,
    TREE_SHARE,
)

NO_LINK = Link(bandwidth=1e30, latency=0.0)
"""The link of ranks that have no other rank to talk to."""


class AlphaBeta(NamedTuple):
    """Seconds that a transfer takes: `alpha + beta * size_bytes`, or those of another protocol where they are
    fewer."""

    alpha: float
    """Seconds that any transfer takes, whatever its size."""
    beta: float
    """Seconds per byte."""
    ll128: AlphaBeta | None = None
    """The same transfer in NCCL's protocol LL128, where the ranks have it."""

    def __call__(self, size_bytes: float) -> float:
        """Returns the seconds for so many bytes."""
        seconds = self.alpha + self.beta * size_bytes
        return seconds if self.ll128 is None else min(seconds, self.ll128(size_bytes))


NOTHING = AlphaBeta(0.0, 0.0)
"""The cost of a collective on one rank alone, which sends nothing."""


class Collectives(NamedTuple):
    """Costs of the collectives among one set of ranks; a size is that of the whole tensor: before reducing,
    after gathering."""

    all_gather: AlphaBeta
    reduce_scatter: AlphaBeta
    broadcast: AlphaBeta
    all_to_all: AlphaBeta
    """The cost of an all-to-all; its size is what one rank sends, the part for itself included."""
    ring: AlphaBeta
    """All-reduce over rings, which is best for large tensors."""
    tree: AlphaBeta
    """All-reduce over trees, which is best for many ranks."""

    def all_reduce(self, size_bytes: float) -> float:
        """Returns the seconds of an all-reduce, by ring or tree, whichever is faster."""
        return min(self.ring(size_bytes), self.tree(size_bytes))

    def bucket_bytes(self) -> int:
        """Gradients to reduce at a time (`bucket_cap_mb`): from torch's default up, until latency is a small part.

        At 256 ranks a bucket of 25 MiB would spend 26 % of its time on latency on ZionEX.
        """
        a_share = (1 - BUCKET_LATENCY_SHARE) / BUCKET_LATENCY_SHARE
        kinds = (self.ring, self.ring.ll128, self.tree, self.tree.ll128)
        sizes = (a_share * kind.alpha / kind.beta for kind in kinds if kind and kind.beta)
        enough = min(sizes, default=0.0)
        return max(BUCKET_BYTES, int(enough))


def collectives(cluster: Cluster, hosts: int, ranks_per_host: int) -> Collectives:
    """Returns the collectives among `ranks_per_host` ranks on each of `hosts` hosts; one rank alone needs 0
    seconds.

    HSDP, for example, gathers among `(1, gpus_per_host)` and all-reduces among `(hosts, 1)`.
    """
    n = hosts * ranks_per_host
    if n == 1:
        return Collectives(*[NOTHING] * 6)
    nvlink = _usable(cluster.nvlink if ranks_per_host > 1 else None, cluster, NVLINK_SHARE)
    network = _usable(cluster.network if hosts > 1 else None, cluster, NETWORK_SHARE)
    beta = 1 / min(nvlink.bandwidth, ranks_per_host * network.bandwidth)
    in_ring = (n - hosts) * nvlink.latency, (hosts - 1) * network.latency
    in_tree = 2 * (ranks_per_host - 1) * nvlink.latency, 2 * int(log2(hosts)) * network.latency
    gather = AlphaBeta(COLLECTIVE_SECONDS + sum(in_ring), beta * (n - 1) / n)
    ring = AlphaBeta(COLLECTIVE_SECONDS + 2 * sum(in_ring), 2 * gather.beta)
    tree = AlphaBeta(COLLECTIVE_SECONDS + sum(in_tree), 2 * beta / TREE_SHARE)
    if _has_ll128(cluster):
        # NCCL: with one rank per host nothing hides a hop of a ring, which then takes as long as one of a tree
        alone = ranks_per_host == 1
        over_network, share = (
            (LL128_TREE_HOPS[1], LL128_SHARE_ALONE) if alone else (LL128_RING_HOPS[1], LL128_SHARE)
        )
        hops = in_ring[0] * LL128_RING_HOPS[0] + in_ring[1] * over_network
        climb = in_tree[0] * LL128_TREE_HOPS[0] + in_tree[1] * LL128_TREE_HOPS[1]
        gather = gather._replace(ll128=AlphaBeta(LL128_SECONDS + hops, gather.beta / share))
        ring = ring._replace(ll128=AlphaBeta(LL128_SECONDS + 2 * hops, ring.beta / share))
        tree = tree._replace(ll128=AlphaBeta(LL128_SECONDS + climb, tree.beta / LL128_TREE_SHARES[hosts > 1]))
    return Collectives(
        all_gather=gather,
        reduce_scatter=gather,
        broadcast=AlphaBeta(gather.alpha, beta),
        all_to_all=AlphaBeta(
            COLLECTIVE_SECONDS + max(nvlink.latency, network.latency),
            max((ranks_per_host - 1) / nvlink.bandwidth, (n - ranks_per_host) / network.bandwidth) / n,
        ),
        ring=ring,
        tree=tree,
    )


def send(cluster: Cluster, *, across_hosts: bool) -> AlphaBeta:
    """Returns what a rank takes to send to one other: over the network by its own card, or inside a host."""
    share = NETWORK_SHARE if across_hosts else NVLINK_SHARE
    link = _usable(cluster.network if across_hosts else cluster.nvlink, cluster, share)
    return AlphaBeta(COLLECTIVE_SECONDS + link.latency, 1 / link.bandwidth)


def _has_ll128(cluster: Cluster) -> bool:
    """Tells whether NCCL would use LL128: where the link in a host is NVLink, and no measurement says better."""
    if cluster.device == "cpu" or cluster.verified or cluster.nvlink is None:
        return False
    return cluster.nvlink.bandwidth > PCIE_BANDWIDTH


def _usable(link: Link | None, cluster: Cluster, share: float) -> Link:
    """Returns the part of a link's bandwidth that collectives reach; measured links are taken as they are."""
    if link is None:
        return NO_LINK
    return link if cluster.verified else Link(bandwidth=share * link.bandwidth, latency=link.latency)
