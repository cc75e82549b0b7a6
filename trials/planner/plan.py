"""Plan: the ladder of strategies for one model, batch and cluster, and the least one that fits.

What "least" means, `trials.planner.ladder` says. Strategies that cannot be taken are priced when somebody
looks at them (`trials.planner.choice`). Pure arithmetic: nothing is built, no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from pydantic import SkipValidation

from dhen.config import DhenConfig, ModelConfig
from dhen.errors import UserError
from dhen.schema import FeatureSchema
from dhen.values import Value
from trials.cluster.cluster import Cluster, byte_words
from trials.cluster.machine import Precision
from trials.planner.choice import (
    PricedLadder,
    check_technique,
    mode_sentences,
    too_few,
    way_out,
    with_servers,
)
from trials.planner.estimates import DEFAULT_OPTIONS, PlanOptions, PricedStrategy
from trials.planner.ladder import (
    LONGEST,
    MICRO_BATCHES,
    PER_STAGE,
    check_degree,
    check_together,
    exclusions_of,
    ladder,
    pipeline_degrees,
    split_ladder,
    staged_ladder,
)
from trials.planner.pipeline import wrong_micro_batches
from trials.planner.pricing import CostModel
from trials.planner.sentences import (
    compression_sentences,
    delay_sentences,
    faster_sentence,
    lacking_sentence,
    option_sentences,
    split_sentences,
)
from trials.planner.table_placement import PlacementError
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy

# The nearest changes of batch, cluster or model under which one strategy would fit, if nothing fits.

MOST_HOSTS = 64
"""Largest number of hosts that is tried, as a multiple of the hosts there are."""


def nearest_change(pricing: CostModel, strategy: Strategy) -> str:
    """Returns a sentence with each single change after which `strategy`, which lacks least, would fit."""
    changes_that_fit = []
    for alternatives in (_batches(pricing), _hosts(pricing), _depths(pricing)):
        for words, changed in alternatives:
            # whether the ladder would have the strategy: a micro-batch holds an example at least, and a stage of a
            # pipeline a layer
            model, stages = changed.model, strategy.pipeline * strategy.chunks_per_rank
            if changed.cluster.ranks % strategy.model_ranks or (
                strategy.pipeline > 1 and isinstance(model, DhenConfig) and stages > len(model.layers)
            ):
                continue
            if strategy.micro_batches > changed.examples(strategy):
                continue
            with suppress(PlacementError):
                if changed.lacking_bytes(changed.memory(strategy)) == 0:
                    changes_that_fit.append(words)
                    break
    if not changes_that_fit:
        return "No smaller batch, more hosts or fewer layers alone would fit: give a rank more memory."
    return f"It would fit with {', or '.join(changes_that_fit)}."


def _batches(pricing: CostModel) -> Iterator[tuple[str, CostModel]]:
    """Yields the batch halved again and again."""
    batch = pricing.batch_size // 2
    while batch >= pricing.cluster.ranks:
        yield f"training.batch_size={batch}", pricing.changed(batch_size=batch)
        batch //= 2


def _hosts(pricing: CostModel) -> Iterator[tuple[str, CostModel]]:
    """Yields one more host, then two, four ... more, if the cluster has a network."""
    cluster, more = pricing.cluster, 1
    while cluster.network and more <= MOST_HOSTS * cluster.hosts:
        larger = cluster.replace(hosts=cluster.hosts + more)
        if pricing.batch_size >= larger.ranks:
            hosts = f"{more} more host{'s' if more > 1 else ''} ({larger.hosts} in all)"
            yield hosts, pricing.changed(cluster=larger)
        more *= 2


def _depths(pricing: CostModel) -> Iterator[tuple[str, CostModel]]:
    """Yields the model with fewer and fewer layers, taken off the end."""
    model = pricing.model
    if isinstance(model, DhenConfig):
        for depth in range(len(model.layers) - 1, 0, -1):
            shorter = model.replace(layers=model.layers[:depth])
            yield f"{depth} of {len(model.layers)} layers", pricing.changed(model=shorter)


NO_STAGES = (
    "A model of the family {!r} has no layers that could be stages of a pipeline: it is held without one."
)


class Plan(Value):
    """How a candidate would be trained on a cluster, and why not otherwise."""

    cluster: str
    hosts: int
    gpus_per_host: int
    hbm: int
    """Memory of one rank's device, in bytes."""
    verified: bool
    """Whether the cluster's numbers were measured on it."""
    batch_size: int
    """Examples of a step over all ranks."""
    examples_per_rank: int
    precision: Precision
    chosen: Strategy | None
    """The strategy that was chosen; None if nothing fits."""
    strategies: SkipValidation[Sequence[PricedStrategy]]
    """The whole ladder, fewer techniques first, of which each strategy is priced when it is looked at; empty if
    the embedding tables alone do not fit."""
    lacking_bytes: int
    """Bytes that the closest strategy lacks if nothing fits, or those that the tables alone lack; 0 if
    something fits."""
    remedy: str | None
    """One or two sentences if nothing fits: how far off the plan is, and the nearest changes that would
    fit; else None."""
    faster: str | None
    """A sentence if a larger set of techniques would be faster than the chosen strategy; else None."""
    notes: tuple[str, ...]
    options: PlanOptions = DEFAULT_OPTIONS
    """What was asked of the plan besides."""
    other_shapes: tuple[str, ...] = ()
    """Of each other shape of ranks that was tried, why it does not do, in a sentence (`plan_in_least_shape`)."""

    @property
    def shape(self) -> str:
        """Hosts x ranks per host, as `ranks=` has them."""
        return f"{self.hosts}x{self.gpus_per_host}"

    @cached_property
    def _unpriced(self) -> tuple[Strategy, ...]:
        if isinstance(self.strategies, PricedLadder):
            return self.strategies.strategies
        return tuple(priced.strategy for priced in self.strategies)

    @property
    def best(self) -> PricedStrategy | None:
        """The chosen strategy, priced; None if nothing fits."""
        return None if self.chosen is None else self.strategies[self._unpriced.index(self.chosen)]

    @cached_property
    def closest(self) -> PricedStrategy | None:
        """The chosen strategy, or if nothing fits the one that lacks least."""
        if self.best is None and isinstance(self.strategies, PricedLadder):
            return self.strategies.closest()
        return self.best or min(self.strategies, key=lambda priced: priced.lacking_bytes, default=None)

    def up_to(self, techniques: int) -> list[PricedStrategy]:
        """Returns the strategies with so many techniques at most, priced, in the ladder's order."""
        places = (n for n, strategy in enumerate(self._unpriced) if len(strategy.techniques) <= techniques)
        return [self.strategies[place] for place in places]


def plan_in_least_shape(
    model: ModelConfig,
    schema: FeatureSchema,
    training: TrainingConfig,
    clusters: Sequence[Cluster],
    *,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Plans a model for one cluster in several shapes, the least first, until a strategy fits; says of each shape
    that was passed over why it does not do.

    If none fits, the plan is for the shape in which the closest strategy lacks least.

    Args:
        model: see `plan`.
        schema: see `plan`.
        training: see `plan`.
        clusters: the cluster in each shape.
        options: what else is asked of plans.

    Raises:
        UserError: if the model can be planned in no shape, with what the last one says.
    """
    unfit: list[Plan] = []
    why_not: dict[str, str] = {}
    for cluster in clusters:
        try:
            found = plan(model, schema, training, cluster, options=options)
        except UserError as error:
            if cluster is clusters[-1] and not unfit:
                raise
            first_sentence = str(error).partition(". ")[0].rstrip(".")
            why_not[cluster.shape] = f"{cluster.shape}: {first_sentence}."
            continue
        if found.chosen is not None:
            return found.replace(other_shapes=tuple(why_not.values()))
        unfit.append(found)
        lacks = found.remedy or "the tables do not fit."
        if found.closest is not None:
            lacking, available = byte_words(found.lacking_bytes), byte_words(found.hbm)
            name = found.closest.strategy.name
            lacks = f"{name} comes closest and lacks {lacking} of {available} per rank."
        why_not[found.shape] = f"{found.shape}: fits nowhere: {lacks}"
    closest = min(unfit, key=lambda one: one.lacking_bytes)
    if len(clusters) == 1:
        return closest
    others = tuple(words for shape, words in why_not.items() if shape != closest.shape)
    remedy = " ".join((f"{closest.shape}: {closest.remedy or 'nothing fits.'}", *others))
    return closest.replace(other_shapes=others, remedy=remedy)


def plan(
    model: ModelConfig,
    schema: FeatureSchema,
    training: TrainingConfig,
    cluster: Cluster,
    *,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Prices the ladder for a model and chooses a strategy.

    Args:
        model: the architecture.
        schema: tables with their rows and pooling factors, numeric inputs.
        training: resolved settings: `batch_size` over all ranks, `precision` not auto.
        cluster: where it would train.
        options: what else is asked of the plan.

    Raises:
        UserError: for a batch smaller than the number of ranks, a technique that these ranks do not have, or
            one that a training setting excludes (`trials.planner.ladder`).
    """
    pricing = CostModel(model, schema, training, cluster, options=options)
    if pricing.batch_size < cluster.ranks and not pricing.alone:
        raise UserError(
            f"training.batch_size={pricing.batch_size} is less than one example for each of {cluster.ranks} "
            f"ranks; give at least {cluster.ranks}, or fewer ranks (ranks=1x1 is one)."
        )
    strategies, too_large = _with_room_for_tables(_allowed(options, cluster, pricing), pricing)
    priced = PricedLadder(pricing, strategies)
    chosen, remedy, lacking = priced.chosen(options.prefer), None, 0
    if chosen is None and (closest := priced.closest()) is not None:
        lacking, memory = closest.lacking_bytes, closest.memory
        if memory.servers and memory.needed <= cluster.hbm:
            change = too_few(pricing, closest.strategy, pricing.host_bytes(memory) - memory.servers)
        else:
            change = nearest_change(pricing, closest.strategy)
        remedy = f"{lacking_sentence(closest, pricing)} {change}"
        if too_large is not None:
            remedy += f" Tables on the device: {too_large}"
    elif too_large is not None and chosen is None:
        decay = training.table_decay
        kept = (
            f" training.table_decay={decay:g} reads every row in every step: with table_decay=0 tables could lie "
            "below the device (host_tables, ssd_tables)."
            if decay and pricing.may_lie_below
            else ""
        )
        remedy, lacking = f"{too_large}{kept}{way_out(pricing)}", too_large.lacking_bytes
    less_cut = None
    if chosen is not None and chosen.strategy.tensor > 1:
        # the closest with as few techniques that leaves modules whole, or, if the chosen one splits them and has
        # pipelines, that does one of the two
        both, most = chosen.strategy.ways_to_cut == 2, len(chosen.strategy.techniques)
        less_cut = priced.closest(
            lambda each: (each.ways_to_cut < 2 if both else each.tensor == 1) and len(each.techniques) <= most
        )
    return Plan(
        cluster=cluster.name,
        hosts=cluster.hosts,
        gpus_per_host=cluster.gpus_per_host,
        hbm=cluster.hbm,
        verified=cluster.verified,
        batch_size=pricing.batch_size,
        examples_per_rank=pricing.examples_per_rank,
        precision=pricing.precision,
        chosen=chosen.strategy if chosen else None,
        strategies=priced,
        lacking_bytes=lacking,
        remedy=remedy,
        faster=faster_sentence(chosen, priced.faster_than(chosen)) if chosen is not None else None,
        notes=(
            *option_sentences(options),
            *delay_sentences(training),
            *compression_sentences(pricing, chosen),
            *([NO_STAGES.format(model.family)] if _without_pipeline(options, model) else []),
            *mode_sentences(chosen.strategy if chosen else None, pricing),
            *split_sentences(chosen, less_cut, pricing),
            *([f"Tables on the device: {too_large}"] if too_large is not None and chosen else []),
            *pricing.notes,
        ),
        options=options,
    )


def _allowed(options: PlanOptions, cluster: Cluster, pricing: CostModel) -> tuple[Strategy, ...]:
    """Returns the ladder, or the part of it that it is restricted to."""
    examples_per_rank = pricing.examples_per_rank
    check_technique(options.technique, pricing)
    asked = options.technique
    if asked is not None:
        check_together(pricing.training, asked)
    split = asked.tensor if asked is not None else 1
    if split > 1:
        check_degree(split, cluster.hosts, cluster.gpus_per_host)
    if asked is not None and asked.pipeline > 1:
        _check_pipeline(asked, cluster, pricing)
        if _without_pipeline(options, pricing.model):
            asked = asked.replace(pipeline=1, schedule="1f1b", micro_batches=1)
            options = options.replace(technique=asked)
    schedule = asked.schedule if asked is not None else "1f1b"
    layers = len(pricing.model.layers) if isinstance(pricing.model, DhenConfig) else 0
    strategies = ladder(cluster.hosts, cluster.gpus_per_host, examples_per_rank, layers, schedule)
    if pricing.on_servers:
        strategies = with_servers(strategies, options, pricing)
    if split > 1:
        staged = staged_ladder(cluster.ranks, examples_per_rank, layers, schedule, split)
        strategies = (*strategies, *split_ladder(split, cluster.ranks, examples_per_rank), *staged)
    else:
        splits = {degree: pricing.splits(degree) for degree in {each.tensor for each in strategies} - {1}}
        strategies = tuple(each for each in strategies if splits.get(each.tensor, True))
    if not pricing.may_lie_below:
        strategies = tuple(strategy for strategy in strategies if strategy.tables == "device")
    for exclusion in exclusions_of(pricing.training):
        strategies = tuple(filter(exclusion.goes_with, strategies))
    allowed = tuple(dict.fromkeys(filter(options.allows, strategies)))
    if asked is not None and not allowed and asked.dense == "zero1" and asked.model_ranks == cluster.ranks:
        raise UserError(
            f"technique={asked.name}: the parts of one model take all {cluster.ranks} ranks, and there is no data "
            f"rank for zero1 to share with. technique={asked.replace(dense='dp').name} would work, or more ranks."
        )
    if options.technique is not None and not allowed:
        names = dict.fromkeys(strategy.held_as for strategy in strategies)
        raise UserError(
            f"technique={options.technique.name} is not on the ladder of {cluster.hosts} x "
            f"{cluster.gpus_per_host} ranks with {examples_per_rank} examples each (training.batch_size="
            f"{pricing.batch_size}). There are "
            f"{', '.join(names)}, each with +micro_batches={', '.join(map(str, MICRO_BATCHES[1:]))} (some with "
            "+no_sync) or without."
        )
    return allowed


def _without_pipeline(options: PlanOptions, model: ModelConfig) -> bool:
    """Tells whether a pipeline is asked for, and the model has no layers that could be its stages: a baseline is
    held as the rest of the technique says."""
    return (
        options.technique is not None and options.technique.pipeline > 1 and not isinstance(model, DhenConfig)
    )


def _check_pipeline(asked: Strategy, cluster: Cluster, pricing: CostModel) -> None:
    """Checks that ranks and model can be the pipelines that are asked for.

    Raises:
        UserError: if they cannot, with what would work.
    """
    model, degree, ranks = pricing.model, asked.pipeline, cluster.ranks
    layers = len(model.layers) if isinstance(model, DhenConfig) else degree * asked.chunks_per_rank
    stages, split = degree * asked.chunks_per_rank, f"tensor{asked.tensor}+" if asked.tensor > 1 else ""
    fitting = pipeline_degrees(ranks // asked.tensor, layers // asked.chunks_per_rank)
    there_are = [f"{split}pipeline{one}" for one in fitting]
    would_work = f"Here {', '.join(there_are)} would work." if there_are else "Leave the pipeline out."
    if ranks % asked.model_ranks:
        of_parts = f" stages of {asked.tensor} ranks" if split else ""
        enough = f"{degree}x{asked.tensor}" if split else f"1x{degree}"
        raise UserError(
            f"technique={asked.name}: ranks={cluster.hosts}x{cluster.gpus_per_host} are {ranks}, which pipelines "
            f"of {degree}{of_parts} do not divide. {would_work} Or give ranks={enough}."
        )
    if stages > layers:
        why = (
            f"{asked.schedule} has {asked.chunks_per_rank} stages for each rank, " if stages > degree else ""
        )
        raise UserError(
            f"technique={asked.name}: {why}a stage has a layer at least, and the model has {layers} layer(s) for "
            f"{stages} stages. {would_work}"
        )
    if degree > LONGEST:
        raise UserError(
            f"technique={asked.name}: a pipeline has {LONGEST} ranks at most, and data parallelism is over the "
            f"others. {would_work}"
        )
    named_none = asked.micro_batches == 1
    examples, most = pricing.examples(asked), degree * PER_STAGE[-1]
    numbers = [n for n in (degree * per_stage for per_stage in PER_STAGE) if n <= examples]
    if not numbers:
        raise UserError(
            f"technique={asked.name}: a pipeline has {examples} example(s) of training.batch_size="
            f"{pricing.batch_size}, fewer than one for a micro-batch of each of its {degree} ranks; give a "
            "larger batch, or leave the pipeline out."
        )
    wrong = None if named_none else wrong_micro_batches(asked.schedule, degree, asked.micro_batches)
    if not named_none and (wrong is not None or asked.micro_batches not in numbers):
        reason = f"{wrong}; " if wrong is not None else ""
        raise UserError(
            f"technique={asked.name}: {reason}a pipeline of {degree} has +micro_batches="
            f"{', '.join(map(str, numbers))} here (1, 2, 4 or 8 for each of its ranks, {most} at most)."
        )


def _with_room_for_tables(
    strategies: tuple[Strategy, ...], pricing: CostModel
) -> tuple[tuple[Strategy, ...], PlacementError | None]:
    """Returns the strategies under which tables fit beside nothing, with the sizes of caches, and why the device
    cannot have the tables, if it cannot."""
    given = pricing.options.technique.table_cache if pricing.options.technique is not None else 0
    below = tuple(
        pricing.sized(strategy.replace(table_cache=given))
        for strategy in strategies
        if strategy.tables != "device"
    )
    on_device = tuple(strategy for strategy in strategies if strategy.tables == "device")
    try:
        if on_device:
            _ = pricing.placement
    except PlacementError as error:
        return below, error
    sized = {strategy.replace(table_cache=0).name: strategy for strategy in below}
    return tuple(sized.get(strategy.name, strategy) for strategy in strategies), None
