"""Collectives by the alpha-beta model, seconds = alpha + beta x bytes, over NVLink in hosts and a network
between.

The formulas are NCCL's own model (src/graph/tuning.cc, `ncclTopoTuneModel`; bus-bandwidth factors in
nccl-tests, doc/PERFORMANCE.md). A ring over n ranks moves (n-1)/n of the tensor past each rank in n-1 steps
(all-gather, reduce-scatter) or twice that (all-reduce); all-reduce takes a tree if its fewer steps win. A
ring that leaves the host crosses the network once per host, and NCCL runs one ring for each network card: with
a card for each of g ranks per host, g cards carry it together, which NVLink may bound instead. All-to-all
sends (n-g)/n of its bytes over a rank's own card, the rest over NVLink at the same time.

As in NCCL, a collective takes the quicker of two protocols: Simple has all the bandwidth, LL128 shorter hops.
NCCL has LL128 between GPUs that NVLink joins; links that were measured are taken as they are, whatever they
ran.

Left out: LL (below some 100 KB), the most that a channel carries (at 8 channels it takes a seventh from trees
between A100), corrections for trees at medium sizes, congestion, in-network reduction, NVLink SHARP.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from trials.cluster.cluster import Cluster, Link

# Constants of accelerators and their libraries that no data sheet of a cluster states.
#
# Each has its source, or is called an assumption. What one GPU can tell was measured on an H100
# (docs/benchmarks/accelerator.md); what is said of several is unverified until a run on some says otherwise.
# None is fitted to a curve of the paper's; which effects are here at all (the slowdown beside collectives, the
# size of buckets) was decided with its Figure 6 in view.

MiB = 2**20

# Speed: which share of a data sheet's peak is reached.

MATMUL_SHARE = 0.75
"""Share of peak FLOP/s that matrix products reach: what torch's own runtime estimate takes
(torch/utils/_runtime_estimation.py, `flops_to_ns`). Small products reach less. Products of 32,768 to
65,536 rows with matrices of 416 to 1,024 reach 0.71 to 0.93 of what one of 8,192 does, on an H100 in bf16,
2026-11-26."""
MEMORY_SHARE = 0.9
"""Share of memory bandwidth that large copies and elementwise kernels reach: an assumption. On an H100 additions
and layer normalisations of 2^27 numbers reach 1.07 and 0.92 of what a large copy does, 2026-11-26."""
LAYER_MEMORY_SHARE = 0.3
"""Share of the bandwidth of copies that the operations of layers reach on a CPU: in bf16 normalisation and
softmax compute more than they read, and large results come in memory that the system must first map. Measured
on eight networks of the default space at batches of 16, 256 and 2048, one thread of a Xeon with AMX,
2026-11-21: 0.32 in bf16, 0.30 in fp32."""
NVLINK_SHARE = 0.8
"""Share of NVLink's bandwidth that NCCL's rings reach: 240 of 300 GB/s on A100, 370 of 450 on H100 (NCCL,
src/graph/topo.h, speed of a link by architecture, as in torch/_inductor/comm_analysis.py)."""
NETWORK_SHARE = 0.9
"""Share of the network's bandwidth that collectives reach: an assumption between the 1.0 of NCCL's model and
the 0.77 to 0.8 that torch/_inductor/comm_analysis.py has from RoCE between two hosts."""
OVERLAP_SLOWDOWN = 0.189
"""Seconds lost per second of compute beside a collective, which takes multiprocessors and memory bandwidth
from compute: the mean of arXiv 2507.03114 (A100, H100, MI210, MI250; at most 0.40)."""

# Speed: what every operation costs, however small.

KERNEL_SECONDS = 5e-6
"""Seconds from one kernel to the next if kernels are small, dispatch included: an assumption."""
OPERATIONS_PER_SEGMENT = 30
"""Operations of the forward pass of one segment of a model (a layer of two or three modules) that declares none:
an assumption."""
LAUNCH_SECONDS = 31e-6
"""Seconds that a GPU's host takes to start what a module declares as one operation on its tape, in the forward
pass. With `HOST_STEP_SECONDS` a line through the steps of 54 small networks (14 to 127 operations, three batch
sizes, two precisions), which differ from it by 11 % on average: an H100 beside a Xeon of 16 cores, 2026-11-26."""
HOST_STEP_SECONDS = 2.7e-3
"""Seconds that a GPU's host takes to start all else of a step: the batch's copies, lookups, loss, optimizers."""
OPERATION_SECONDS = 45e-6
"""Seconds on a CPU from one operation that a module declares on its tape to the next: an operation is several
calls of torch with what Python and autograd add. Measured with `LAYER_MEMORY_SHARE`, beside other work: 53 us
in bf16, 34 in fp32."""
COLLECTIVE_SECONDS = 8.4e-6
"""Seconds to start a collective: NCCL, src/graph/tuning.cc, baseLat (Simple protocol, ring and tree
alike)."""
TREE_SHARE = 0.92
"""Share of a ring's bus bandwidth that all-reduce over trees reaches: NCCL, src/graph/tuning.cc (Simple
protocol)."""
LL128_SECONDS = 14e-6
"""Seconds to start a collective in LL128, NCCL's protocol for messages of a few MB: src/graph/tuning.cc, baseLat
(ring and tree alike)."""
LL128_RING_HOPS = 1.9 / 3.4, 4.0 / 14.0
"""Latency of a hop over NVLink and over the network in a ring, in LL128, as shares of that of the protocol Simple:
NCCL, src/graph/tuning.cc, hwLat."""
LL128_TREE_HOPS = 1.25 / 3.4, 8.5 / 14.0
"""The same of a hop in a tree, as shares of that of a ring in the protocol Simple, which a cluster's link has."""
LL128_SHARE = 0.92
"""Share of a ring's bandwidth in the protocol Simple that it reaches in LL128, where 8 of 128 bytes are flags:
NCCL, src/graph/tuning.cc."""
LL128_SHARE_ALONE = 0.7
"""The same with one rank per host."""
LL128_TREE_SHARES = 7 / 9, 120 / 128
"""Shares of a tree's bandwidth in the protocol Simple that it reaches in LL128 in a host and between hosts: NCCL,
src/graph/tuning.cc."""
PCIE_BANDWIDTH = 64e9
"""Bytes/s of 16 lanes of PCIe 5.0 in one direction, by its specification: a link that is faster is NVLink."""
BUCKET_BYTES = 25 * MiB
"""Bytes of gradients that DistributedDataParallel reduces at a time, at least: its default
`bucket_cap_mb`."""
BUCKET_LATENCY_SHARE = 0.2
"""Largest share of a bucket's all-reduce that latency may take: buckets grow with the number of ranks."""
HOST_MEMORY_BANDWIDTH = 200e9
"""Bytes/s of a host's memory, all its ranks together, while its CPUs update offloaded parameters: an assumption,
half of two sockets of eight channels of DDR4-3200 (410 GB/s by data sheet)."""

# Memory beside tensors, on a GPU; 0 on a CPU.

CUBLAS_WORKSPACE_BYTES = 64 * MiB
"""Workspaces of cuBLAS as torch allocates them, 32 MiB each on Hopper, for the forward and for the backward pass,
which run in threads of their own: what an H100's allocator holds beyond tensors, 2026-11-26."""
NCCL_COMMUNICATOR_BYTES = 256 * MiB
"""Channels' buffers of one communicator: an assumption (NCCL_BUFFSIZE is 4 MiB for each connection of each of
8 to 32 channels)."""
ALLOCATOR_RESERVE_BYTES = 512 * MiB
"""What torch's caching allocator holds beyond tensors at most, by rounding and fragments: 0.04 to 0.45 GiB on an
H100 beside 0.2 to 11 GiB of tensors, with segments that can be expanded, as ranks have them; without, up to 2.6
GiB. Beside small tensors it is as much as they take, and `LEAST_RESERVE_BYTES`."""
LEAST_RESERVE_BYTES = 128 * MiB
"""What a GPU is left beside small tensors: an evaluation takes up to 8,192 rows there, whatever the batch. An
H100's allocator held 86 to 170 MiB with those, cuBLAS's workspaces among them, 2026-11-27."""


NO_LINK = Link(bandwidth=1e30, latency=0.0)
"""The link of ranks that have no other rank to talk to."""


class AlphaBeta(NamedTuple):
    """Seconds that a transfer takes: `alpha + beta * size_bytes`, or those of another protocol if they are
    fewer."""

    alpha: float
    """Seconds that any transfer takes, whatever its size."""
    beta: float
    """Seconds per byte."""
    ll128: AlphaBeta | None = None
    """The same transfer in NCCL's protocol LL128, if the ranks have it."""

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
        return Collectives(*[NOTHING] * 5)
    nvlink = _usable(cluster.nvlink if ranks_per_host > 1 else None, cluster, NVLINK_SHARE)
    network = _usable(cluster.network if hosts > 1 else None, cluster, NETWORK_SHARE)
    beta = 1 / min(nvlink.bandwidth, ranks_per_host * network.bandwidth)
    in_ring = (n - hosts) * nvlink.latency, (hosts - 1) * network.latency
    in_tree = 2 * (ranks_per_host - 1) * nvlink.latency, 2 * int(log2(hosts)) * network.latency
    gather = AlphaBeta(COLLECTIVE_SECONDS + sum(in_ring), beta * (n - 1) / n)
    ring = AlphaBeta(COLLECTIVE_SECONDS + 2 * sum(in_ring), 2 * gather.beta)
    tree = AlphaBeta(COLLECTIVE_SECONDS + sum(in_tree), 2 * beta / TREE_SHARE)
    # NCCL would use LL128 if the link in a host is NVLink, and no measurement says better
    measured, in_host = cluster.device == "cpu" or cluster.verified, cluster.nvlink
    if not measured and in_host is not None and in_host.bandwidth > PCIE_BANDWIDTH:
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


def _usable(link: Link | None, cluster: Cluster, share: float) -> Link:
    """Returns the part of a link's bandwidth that collectives reach; measured links are taken as they are."""
    if link is None:
        return NO_LINK
    return link if cluster.verified else Link(bandwidth=share * link.bandwidth, latency=link.latency)
