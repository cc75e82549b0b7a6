"""The dense part's optimizer, AdamW, and its state, to save it and to load into it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.optim import AdamW, Optimizer

from dhen.inputs.features import EmbeddingTables
from trials.cluster.machine import Precision, device
from trials.records.job import TrainingConfig
from trials.store.weights import Weights

# AdamW (arXiv 1711.05101, algorithm 2) whose two moments are stored in bf16, rounded stochastically.
#
# A moment changes by a share of 1 - beta a step, the second one by a thousandth; bf16 tells numbers apart that
# differ by a 256th. Rounded to the nearest it would stay where it is for ever; rounded up with the probability
# that makes its mean right it follows (arXiv 1502.02551). PyTorch's own kernel updates a chunk of numbers at a
# time, from moments in fp32, so that no temporary is as long as the weights. Weights are fp32.
#
# Random bits follow from PyTorch's seed when the optimizer was made and from the number of the step: replicas
# round alike, and a training that is resumed goes on as it would have.

CHUNKS: dict[str, int] = {"cpu": 2**15, "cuda": 2**22}
"""Numbers that are updated at a time: as many as stay in a core's cache, or as keep a GPU busy. They are multiples
of 2^15, so that the ring of random bits comes out even."""
WORKSPACE_BYTES = 8
"""Bytes of workspace for each number of a chunk: its two moments in fp32."""
INT32_BYTES = 4
DROPPED_BITS = 16
"""Number of the bits of fp32 that bf16 does not have."""
DRAWS: int = 2**DROPPED_BITS
"""Number of values that the dropped bits may have."""


class Bf16AdamW(Optimizer):
    """AdamW of fp32 weights, whole or sharded, with bf16 moments."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Takes the arguments of `torch.optim.AdamW`."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._seed = torch.initial_seed()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every weight that has a gradient; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, index, group)

    def _update(self, parameter: nn.Parameter, index: int, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = _state(self, parameter), group["betas"]
        state["step"] += 1
        assert parameter.grad is not None
        tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        flat = [_local(tensor).view(-1) for tensor in tensors]
        device = flat[0].device
        chunk = CHUNKS[device.type]
        workspace = torch.empty(2 * min(chunk, len(flat[0])), device=device)
        step = torch.full((), state["step"], dtype=torch.float32, device=device)
        draws = random.Random(hash((self._seed, state["step"], index)))
        chunks = zip(*(torch.split(tensor, chunk) for tensor in flat), strict=True)
        for weight_N, gradient_N, mean_N, square_N in chunks:
            exact = workspace[: 2 * len(weight_N)]
            exact_mean_N, exact_square_N = exact.view(2, -1)
            exact_mean_N.copy_(mean_N)
            exact_square_N.copy_(square_N)
            torch._fused_adamw_(
                [weight_N],
                [gradient_N],
                [exact_mean_N],
                [exact_square_N],
                [],
                [step],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            mean_bits_N, square_bits_N = round_to_bf16(exact, draws).view(2, -1)
            mean_N.view(torch.int16).copy_(mean_bits_N)
            square_N.view(torch.int16).copy_(square_bits_N)


def round_to_bf16(x_N: Tensor, draws: random.Random) -> Tensor:
    """Rounds fp32 (N), which is overwritten, to int32 (N), whose lower halves are the bits of bf16 numbers.

    Each result is one of the two neighbours of a number, so that the mean stays: a random number added to the
    bits that bf16 drops carries over as often as they are large. Larger bits are larger magnitudes, whatever the
    sign.
    """
    bits_N = x_N.view(torch.int32)
    return bits_N.add_(random_bits(len(bits_N), bits_N.device, draws)).bitwise_right_shift_(DROPPED_BITS)


def random_bits(count: int, device: torch.device, draws: random.Random) -> Tensor:
    """Returns int32 of (count), uniform in [0, DRAWS): from a place in a ring of random bits that is drawn anew
    every time.

    PyTorch's CPU generator takes as long for a number as the whole update.
    """
    start = draws.randrange(DRAWS)
    return _ring(device)[start : start + count]


@cache
def _ring(device: torch.device) -> Tensor:
    """Returns every value equally often, always in the same order; long enough from any place for a chunk's two
    moments."""
    values = torch.randperm(DRAWS, generator=torch.Generator().manual_seed(DRAWS), dtype=torch.int32)
    return values.repeat(ring_bytes(device.type) // values.nbytes).to(device)


def ring_bytes(device: str) -> int:
    """Returns the bytes that the random bits take, on `cpu` or `cuda`."""
    return INT32_BYTES * (DRAWS + 2 * CHUNKS[device])


def _local(tensor: Tensor) -> Tensor:
    # DTensors have this method; their package takes a second to import, which every command would wait for
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names of the state that has a number for each weight."""


def adamw(parameters: list[nn.Parameter], config: TrainingConfig) -> Optimizer:
    """Returns AdamW of these weights, with its moments in `config.optimizer_precision`."""
    rates: dict[str, Any] = {"lr": config.dense_learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer_precision == "fp32":
        return AdamW(parameters, fused=True, **rates)
    return Bf16AdamW(parameters, **rates)


def moments(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Returns AdamW's two moments of a parameter, zeros before its first step; what is loaded into them counts."""
    state = _state(optimizer, parameter)
    return {moment: state[moment] for moment in MOMENTS}


def set_steps(optimizer: Optimizer, parameter: nn.Parameter, steps: int) -> None:
    """Sets the number of steps, after moments were loaded as they are after so many steps."""
    state = _state(optimizer, parameter)
    if isinstance(optimizer, Bf16AdamW):
        state["step"] = steps
    else:
        state["step"].fill_(steps)


def _state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Returns a parameter's state as the first step would make it; with bf16 moments `step` is a number."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        in_bf16 = isinstance(optimizer, Bf16AdamW)
        state["step"] = 0 if in_bf16 else torch.zeros((), dtype=torch.float32, device=parameter.device)
        dtype = torch.bfloat16 if in_bf16 else parameter.dtype
        state |= {moment: torch.zeros_like(parameter, dtype=dtype).detach() for moment in MOMENTS}
    return state


# The dense part in mixed precision: fp32 master weights for the optimizer, a copy that the model computes with.
#
# As in Mixed Precision Training (arXiv 1710.03740) and FSDP's `param_dtype`, without autocast's casts at every
# operation. All dense weights lie one after another in one tensor, so casting, gathering gradients and the
# optimizer's update are one operation each, however many layers there are. Tables keep fp32 and are not
# part of it.

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIGNMENT_BYTES = 16
"""Compiled kernels of a GPU take for granted that a weight begins at a multiple of it, where that of the layer did
for which they were compiled; another layer of the same shapes shares them."""


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns all parameters but the embedding tables, by name."""
    tables = {id(table.weight) for table in embedding_tables(model)}
    return {name: p for name, p in model.named_parameters() if id(p) not in tables}


def embedding_tables(model: nn.Module) -> list[EmbeddingTables]:
    """Returns the model's tables (one module if a log has any)."""
    return [module for module in model.modules() if isinstance(module, EmbeddingTables)]


def compute_in(model: nn.Module, precision: Precision) -> nn.Module:
    """Returns the model with its dense part cast to the precision it computes in, to evaluate it."""
    for parameter in dense_parameters(model).values():
        parameter.data = parameter.data.to(DTYPES[precision])
    return model


def all_finite(values: Tensor) -> bool:
    """Tells whether no number is NaN or infinite, with no memory for it: `isfinite` takes half as much again as
    the weights themselves."""
    return values.numel() == 0 or all(bool(end.isfinite()) for end in torch.aminmax(values.detach()))


class MasterWeights:
    """The dense weights of a model that is being trained."""

    def __init__(self, model: nn.Module, precision: Precision, *, aligned: bool = False) -> None:
        """Takes the model's weights over: its parameters become views of one tensor in `precision`, `aligned` for
        compiled kernels, with zeros between them."""
        self._model, self._dense = model, dense_parameters(model)
        dtype = DTYPES[precision]
        multiple = ALIGNMENT_BYTES // dtype.itemsize if aligned else 1
        # the stage of a pipeline may have none, and then an empty vector
        values = [p.detach().flatten() for p in self._dense.values()] or [torch.zeros(0)]
        self._lengths = [len(each) for each in values]
        self._gaps = [each.new_zeros(-len(each) % multiple, dtype=dtype) for each in values]
        # lengths with the gaps behind them
        self._places = [len(each) + len(gap) for each, gap in zip(values, self._gaps, strict=True)]
        self.flat = nn.Parameter(torch.cat(self._with_gaps(values)))
        """All dense weights in fp32, which the optimizer updates; their gradient is set by `gather_gradients`."""
        self._compute = self.flat.detach().to(dtype)
        for parameter, view in zip(self._dense.values(), self._views(self._compute), strict=False):
            parameter.data = view

    @property
    def length(self) -> int:
        """Number of dense weights."""
        return sum(self._lengths)

    @property
    def ranges(self) -> list[tuple[int, slice]]:
        """Returns where in `flat` the weights are: one range, or one for each of them if gaps align them, each
        behind the number of weights before it."""
        if self.flat.numel() == self.length:
            return [(0, slice(0, self.length))]
        starts, places = accumulate(self._lengths, initial=0), accumulate(self._places, initial=0)
        return [
            (start, slice(place, place + length))
            for start, place, length in zip(starts, places, self._lengths, strict=False)
        ]

    def gather_gradients(self, *, in_buckets: bool = False) -> None:
        """Turns the model's gradients into the gradient of `flat`; the model's own are dropped.

        Gradients that lie in a collective's buckets stay there, set to zero, so that the next step's add up in
        place: micro-batches would otherwise need as much memory again.
        """
        gradients = [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self._dense.values()
        ]
        self.flat.grad = torch.empty_like(self.flat)
        if gradients:
            torch.cat(self._with_gaps(gradients), out=self.flat.grad)
        if in_buckets:
            torch._foreach_zero_(gradients)
            return
        for parameter in self._dense.values():
            parameter.grad = None

    def publish(self) -> None:
        """Copies `flat` to what the model computes with, after the update; the gradient of `flat` is freed.

        In fp32 the model computes with `flat` itself.
        """
        self.flat.grad = None
        if self._compute.dtype is not self.flat.dtype:
            self._compute.copy_(self.flat.detach())

    def weights(self) -> Weights:
        """Returns a copy of the model's weights on the CPU, the dense ones in fp32."""
        masters = dict(zip(self._dense, self._views(self.flat.detach()), strict=True))
        return {
            name: masters.get(name, tensor).detach().to("cpu", copy=True)
            for name, tensor in self._model.state_dict().items()
        }

    def _with_gaps(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the tensors, each with the zeros behind it."""
        pairs = zip(tensors, self._gaps, strict=True)
        return [each for tensor, gap in pairs for each in ((tensor, gap) if len(gap) else (tensor,))]

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(torch.split(flat, self._places), self._lengths, self._dense.values(), strict=False)
        return [piece[:length].view_as(parameter) for piece, length, parameter in pieces]


# Clipping of the dense part's gradients by their global norm (arXiv 1211.5063, algorithm 1).
#
# The norm is the Euclidean one of the gradients of all dense weights together, as of one vector; if it is
# larger than `training.clip_norm`, all of them are multiplied by `clip_norm` / norm. Gradients are those of the
# whole batch: averaged over ranks, all micro-batches added up. If ranks hold parts of them, the parts'
# squared norms are added up over the ranks, one number each.
#
# If ranks no longer average their gradients (one-bit Adam's second stage), the norm is the root mean square
# of the norms of the ranks' own gradients, which is at least that of the average: all ranks clip by the same
# factor, so that the average keeps its direction.
#
# Embedding tables are left out, of the norm and of the clipping: row-wise Adagrad divides a row's gradient by
# the root of its mean squares so far, which is a bound of its own, and engines that shard tables update a row as
# soon as its gradient is there, before a norm over all of them could be known.

SMALLEST_NORM = 1e-6
"""What is added to the norm that is divided by, as `torch.nn.utils.clip_grad_norm_` does."""


class Clip:
    """Clips the gradients of one engine."""

    def __init__(
        self, largest_norm: float | None, process_group: dist.ProcessGroup | None = None, copies: int = 1
    ) -> None:
        """Takes what does not change from step to step.

        Args:
            largest_norm: `training.clip_norm`; None to leave gradients as they are.
            process_group: the ranks that hold a part of the gradients each; None if this rank holds all of
                them.
            copies: number of copies that these ranks hold together.
        """
        self._largest_norm, self._group = largest_norm, process_group
        self._copies = copies
        self._tensor_group: dist.ProcessGroup | None = None
        self._replicated: Sequence[Sequence[slice]] = ()
        self._clipped: Tensor | None = None

    def of_own_gradients(self, process_group: dist.ProcessGroup | None) -> None:
        """From now on these ranks have a whole gradient of their own each, whose average is that of the batch."""
        self._group = process_group
        self._copies = 1 if process_group is None else dist.get_world_size(process_group)

    def over(self, tensor_group: dist.ProcessGroup, replicated: Sequence[Sequence[slice]]) -> None:
        """Takes the norm over the ranks of a tensor group too.

        Args:
            tensor_group: the ranks that have a part of the split weights each, and all of the others.
            replicated: of each gradient that will be clipped, in order, the ranges that all of them have alike.
        """
        self._tensor_group, self._replicated = tensor_group, replicated

    @torch.no_grad()
    def __call__(self, gradients: Iterable[Tensor | None]) -> None:
        """Clips in place what this rank has of the whole batch's gradients, None if a weight has none; a
        collective if ranks hold parts."""
        if self._largest_norm is None:  # before anything is read, which may still be on its way to the host
            return
        mine = [gradient for gradient in gradients if gradient is not None]
        squares = _sum_of_squares(mine)
        if self._tensor_group is not None:
            # each tensor rank gives its share of what all have alike
            pairs = zip(mine, self._replicated, strict=True)
            if parts := [gradient[where] for gradient, ranges in pairs for where in ranges]:
                squares -= (1 - 1 / dist.get_world_size(self._tensor_group)) * _sum_of_squares(parts)
            dist.all_reduce(squares, group=self._tensor_group)
        if self._group is not None:
            squares = squares.to(device())  # offloaded parts are on the host, where NCCL does not send
            dist.all_reduce(squares, group=self._group)
            squares /= self._copies
        # multiplied by 1 if the norm is small enough: nobody waits for an accelerator to know it
        factor = (self._largest_norm / (squares.sqrt() + SMALLEST_NORM)).clamp_(max=1.0)
        for gradient in mine:
            gradient.mul_(factor.to(gradient.device))
        clipped = (factor < 1.0).long()
        self._clipped = clipped if self._clipped is None else clipped + self._clipped

    def clipped_steps(self) -> int:
        """Returns the number of steps since the last call whose gradients were longer than the largest norm; the
        same on all ranks. It waits for an accelerator."""
        counted, self._clipped = self._clipped, None
        return 0 if counted is None else int(counted)


def _sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Returns the squared norm of all parts as one vector, a number; no part is copied."""
    return torch.stack([vector_norm(part).square() for part in parts]).sum()
