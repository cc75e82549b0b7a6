"""Constants of accelerators and their libraries that no data sheet of a cluster states.

Each has its source, or is called an assumption. What one GPU can tell was measured on an H100
(docs/benchmarks/accelerator.md); what is said of several is unverified until a run on some says otherwise. None
is fitted to a curve of the paper's; which effects are here at all (the slowdown beside collectives, the size of
buckets) was decided with its Figure 6 in view.
"""

from __future__ import annotations

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
"""Seconds from one kernel to the next where kernels are small, dispatch included: an assumption."""
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
