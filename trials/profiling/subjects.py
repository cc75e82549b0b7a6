"""What is measured: every interaction module, ensemble, norm and small part, each alone and at a few sizes.

The sizes are fixed, so that no network that is to be predicted is looked at. A module is taken with its settings
as they are by default and with each of its numbers doubled, as far as it allows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhen.blocks import BLOCKS, BlockConfig, BlockShape
from dhen.cost import headline_flops
from dhen.ensembles import ENSEMBLES
from dhen.ensembles.base import EnsembleShape
from dhen.layer import write_block, write_ensemble, write_norm
from dhen.members import MemberAdapter, adapter_tape
from dhen.memory.parts import Part, mapping, parts
from dhen.memory.tape import Tape
from dhen.ops.norm import NormKind, build_norm
from dhen.ops.parts import mlp, mlp_cost, mlp_tape

SHAPES = ((8, 8, 4), (40, 16, 8), (16, 64, 16), (24, 32, 32))
"""M, D and L at which modules are measured."""
MLPS = ((64, (64,)), (256, (128,)), (1024, (256, 128)), (13, (64, 32)), (512, (64,)))
"""Inputs and widths of the MLPs that are measured."""
DROPOUT = 0.1
IN_PLACE_OF_0 = 8
"""What a number that is 0 by default becomes where the others are doubled."""
MEMBERS = 4
NORMS: tuple[NormKind, ...] = ("layer", "rms")


class Subject(NamedTuple):
    """A part that is measured, at any batch."""

    part: Part
    """Its kind and sizes."""
    module: nn.Module
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the module's inputs, without the batch."""
    call: Callable[[nn.Module, list[Tensor]], Tensor]
    """Runs the module on its inputs."""


def subjects(itemsize: int) -> Iterator[Subject]:
    """Yields what is measured, for numbers of so many bytes."""
    for block_class in BLOCKS.values():
        yield from _blocks(block_class, itemsize)
    yield from _ensembles(itemsize)
    for m, d, out in SHAPES:
        yield from _norms(m, d, itemsize)
        yield from _sums(out, d, itemsize)
        tape = Tape(itemsize)
        tape.rows = MEMBERS
        tape.mark("adapter", mapping(0.0, m, d, m))
        adapter_tape(tape, tape.input(m * d), MEMBERS, m, d)
        adapter = MemberAdapter(MEMBERS, m, d, parting=False)
        yield Subject(_only(tape), adapter, ((MEMBERS, m, d),), lambda module, x: module(x[0].flatten(0, 1)))
    for n_in, widths in MLPS:
        for dropout in (0.0, DROPOUT):
            tape = Tape(itemsize)
            tape.mark("mlp", mapping(headline_flops(mlp_cost("", n_in, widths)), 1, n_in, 1))
            mlp_tape(tape, tape.input(n_in), n_in, widths, dropout=dropout)
            yield Subject(_only(tape), mlp(n_in, widths, dropout=dropout), ((n_in,),), _called)


def _only(tape: Tape) -> Part:
    (part,) = parts(tape)
    return part


def _called(module: nn.Module, inputs: list[Tensor]) -> Tensor:
    return module(*inputs)  # type: ignore[no-any-return]


def variants(block_class: type[BlockConfig]) -> list[BlockConfig]:
    """Returns a module's configuration by default, with each of its numbers doubled, and with dropout."""
    default = block_class.model_validate({})
    found = [default]
    for name in type(default).model_fields:
        for larger in _larger(getattr(default, name)):
            try:
                found.append(default.replace(**{name: larger}))
            except ValueError:
                continue
            break
    if "dropout" in type(default).model_fields:
        found.append(default.replace(dropout=DROPOUT))
    return found


def _larger(value: object) -> list[object]:
    """Returns values to try in place of a number, or of widths: some numbers must be odd."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [2 * value, 2 * value + 1] if value else [IN_PLACE_OF_0]
    if isinstance(value, tuple) and value and all(isinstance(each, int) for each in value):
        return [tuple(2 * each for each in value)]
    return []


def _blocks(block_class: type[BlockConfig], itemsize: int) -> Iterator[Subject]:
    """Yields a module as it is by default at every shape, and every variant at one."""
    default, *others = variants(block_class)
    for config, (m, d, out) in zip([default] * len(SHAPES) + others, cycle(SHAPES), strict=False):
        shape, tape = BlockShape(embeddings=m, dim=d, out=out), Tape(itemsize)
        try:
            config.check(d)
            write_block(tape, tape.input(m * d), config, shape, dropout=0.0)
        except (ValueError, NotImplementedError):  # it cannot stand here, or declares nothing
            continue
        module = config.build(shape, dropout=config.dropout_in(0.0))
        yield Subject(_only(tape), module, ((m, d),), _called)


def _ensembles(itemsize: int) -> Iterator[Subject]:
    for ensemble_class in ENSEMBLES.values():
        for modules, (m, d, out) in enumerate(SHAPES, start=1):
            ensemble, tape = ensemble_class.model_validate({}), Tape(itemsize)
            shape = EnsembleShape(modules=modules, out=out, embeddings=m, dim=d)
            outputs = [tape.input(out * d) for _ in range(modules)]
            write_ensemble(tape, outputs, tape.input(m * d), ensemble, shape)
            inputs = (*[(out, d)] * modules, (m, d))
            yield Subject(_only(tape), ensemble.build(shape), inputs, lambda module, x: module(x[:-1], x[-1]))


def _norms(embeddings: int, dim: int, itemsize: int) -> Iterator[Subject]:
    for norm in NORMS:
        tape = Tape(itemsize)
        write_norm(tape, tape.input(embeddings * dim), norm, embeddings, dim)
        yield Subject(_only(tape), build_norm(norm, dim), ((embeddings, dim),), _called)


def _sums(embeddings: int, dim: int, itemsize: int) -> Iterator[Subject]:
    """Yields the sum with the shortcut, and embeddings put one behind the others."""
    both = ((embeddings, dim), (embeddings, dim))
    tape = Tape(itemsize)
    tape.mark("sum", mapping(0.0, embeddings, dim, embeddings))
    tape.add(*(tape.input(embeddings * dim) for _ in both))
    yield Subject(_only(tape), nn.Identity(), both, lambda _, x: x[0] + x[1])
    tape = Tape(itemsize)
    tape.mark("concat", mapping(0.0, 2 * embeddings, dim, 2 * embeddings))
    tape.concat([tape.input(embeddings * dim) for _ in both])
    yield Subject(_only(tape), nn.Identity(), both, lambda _, x: torch.cat(x, dim=1))
