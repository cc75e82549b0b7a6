"""Opens a study in a run directory: its settings are checked, its database is read, its driver is put together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dashboards.sentences.stages import decay_left_out, warm_starts
from dhen.errors import UserError
from dhen.values import compact, parse
from search.analysis.losses import blocks_of
from search.config import StudyConfig
from search.execution.admission import Admission
from search.execution.attempts import Parallelism, execution, most_ranks, ranks_here, study_parallelism
from search.execution.budget import Budget
from search.execution.clock import StudyClock
from search.execution.growth import Growth, ordered_axes, widen_again, widen_as_earlier
from search.execution.later_stages import LaterStages
from search.execution.passes import (
    OF_TABLES,
    PassFinder,
    excludes_decay_of_tables,
    known_passes,
    without_tables,
)
from search.execution.plan_trial import check_some_fit, check_some_tables_fit
from search.execution.proposals import OutsideProposals, Proposer, lines_of_file, lines_of_function
from search.execution.reduce_events import cut_short, without_driver
from search.execution.retraining import SPLIT
from search.execution.trainer import Trainer
from search.read_study import read_study
from search.run_directory import database_url, study_name
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer
from search.samplers.stopping import stopping_rule
from search.study.candidates import CandidateSource
from search.study.driver import StudyDriver
from search.study.drivers import Sharing
from search.study.finalize import Finalizer
from search.study.parts import StudyParts
from search.study.reuse import (
    EarlierResults,
    WarmStart,
    WinnerWeights,
    earlier_study,
    points_of,
    read_other_study,
    read_reused,
)
from search.study.settings import StudySettings, check_training_axes
from search.study.trial_runner import TrialRunner
from search.study.tuning import (
    MODEL_AXES,
    Baseline,
    SmallestDifference,
    StudyJobs,
    check_tunable,
    is_tunable,
    read_baseline,
)
from search.study_state import Observer, StudyState
from spaces.axes import ChoiceAxis
from spaces.space import Candidate, Space, load_space
from trials.data.log_views import check_origins
from trials.data.periods import check_periods
from trials.data.prepared_log import PreparedLog
from trials.records.job import check_order
from trials.records.study_record import FoundPasses, GrownAxis, RefusedProposal, covered_seconds
from trials.runtime.launcher import AnyLauncher
from trials.store.ledger import Ledger
from trials.training.embeddings.requirements import check_torchrec


def open_study(
    config: StudyConfig,
    directory: Path,
    log: PreparedLog,
    launcher: AnyLauncher,
    observers: Sequence[Observer] = (),
    proposer: Proposer | None = None,
    clock: StudyClock | None = None,
    *,
    joins: bool = False,
    shares: Parallelism | None = None,
    average_seeds: int = 1,
) -> StudyDriver:
    """The driver of a study, new or resumed, or one more of a study that has drivers.

    Args:
        config: what the study is.
        directory: where it lives; nobody else drives it.
        log: that it searches on.
        launcher: starts processes.
        observers: follow its state.
        proposer: asked for candidates in turn with the sampler, in place of the file that `proposals` names.
        clock: runs since the command began; by default since now.
        joins: whether another driver has begun the study, or goes on with it.
        shares: what trials have of what they train on; by default of this machine.
        average_seeds: trainings of the best network that may be members of averages, each from its own seed.

    Raises:
        UserError: for an impossible space, an unknown sampler, rule or baseline, a database out of reach, one that
            holds another study of this name, or a memory in which nothing fits.
    """
    space, baseline = load_space(config.space, log.features), read_baseline(config, log.features)
    _check(config, space, log)
    rule = stopping_rule(config.stopping)
    ledger = Ledger(database_url(directory, config.storage), study_name(directory, config.name))
    sharing = Sharing(ledger, directory, joins=joins) if ledger.database.takes_several_drivers else None
    with contextlib.ExitStack() as undone:
        if sharing is not None:
            undone.callback(sharing.close)
        shares = shares or study_parallelism(config)
        settings = StudySettings(
            ledger,
            config,
            directory,
            log,
            space,
            shares,
            joins=sharing is not None and sharing.joins,
        )
        # the space is as wide as earlier sessions have made it; a new study's as those have that it begins from
        grown = settings.head.grown
        widen_again(space, grown)
        if config.grow and not settings.begun:
            earlier = [(name, earlier_study(name)) for name in config.warm_start]
            earlier += [(name, read_other_study(name)) for name in config.start_from]
            grown = widen_as_earlier(space, earlier)
        settings.head = settings.head.replace(grown=grown, axes=ordered_axes(space))
        as_it_stands = cut_short if sharing is None else sharing.as_it_stands
        trials = [compact(as_it_stands(trial)) for trial in ledger.trials()]
        executed = execution(config, *settings.clusters, threads=shares.threads)
        trainer = Trainer(
            launcher,
            log,
            directory,
            threads=shares.threads,
            precision=settings.precision,
            execution=executed,
            ranks_at_once=shares.ranks,
        )
        admission = Admission(
            clusters=settings.clusters,
            execution=executed,
            limits=config.limits,
            measure_ms=trainer.forward_ms,
            trials=trials,
        )
        noted = settings.once(
            "undecayed", lambda: {"under": _undecayed(config, space, baseline, trainer, admission)}
        )
        settings.head = settings.head.replace(undecayed_under=noted["under"])
        passes = _passes(config, baseline, settings)
        jobs = StudyJobs(config=config, trainer=trainer, space=space, baseline=baseline, passes=passes)
        reused = EarlierResults()
        if config.warm_start:  # what they had learned when this study began
            found = settings.once(
                "warm_start",
                lambda: read_reused(config, log, space, jobs.of_candidate, admission.admit_by_size).to_dict(),
            )
            reused = parse(EarlierResults, found, "the warm start in the study's database")
            settings.head = settings.head.replace(earlier=reused.studies)
        warm_start = WarmStart(reused, space, jobs.of_candidate)
        starts = settings.once(
            "start_from", lambda: {"points": points_of(space, map(read_other_study, config.start_from))}
        )
        head = settings.head.replace(
            comparisons=ledger.comparisons(),
            ablations=ledger.ablations(),
            slices=ledger.slices(),
        )
        clock = clock or StudyClock()
        state = StudyState(
            head,
            trials,
            [cut_short(trial) for trial in ledger.retrainings()],
            averages=config.most_averaged > 0,
            observers=(*observers, settings.keep_time),
            clock=clock.seconds,
        )
        settings.state = state
        clock.earlier_seconds = max(head.elapsed_seconds, covered_seconds(trials))
        state.notices += warm_starts(head)
        if head.undecayed_under is not None:
            state.notices.append(decay_left_out(head.undecayed_under))
        weights = WinnerWeights(directory, state, warm_start)
        later = None
        if config.minutes is not None:
            later = LaterStages(config, state, log.manifest.rows, side_by_side=shares.side_by_side)
        budget = Budget(
            config,
            state,
            spent=settings.had_finished,
            later=later,
            detectable=SmallestDifference(config, log, state, trainer, weights),
            tunable=is_tunable(space),
            corrections=executed.corrections,
        )

        def fits(candidate: Candidate) -> bool:
            """Whether a plan makes a candidate fit, in a time that the minutes are long enough for."""
            try:
                best = (plan := admission.plan(jobs.of_candidate(candidate))).best
            except UserError:
                return False
            factor = 1.0 if executed.corrections is None else executed.corrections.factor(plan)
            return best is not None and budget.is_worth_its_time(
                factor * best.seconds_per_batch / plan.batch_size
            )

        pricer = CandidatePricer(space, log.features, fits, config.limits, config.training)
        proposals = Proposals(sampler=config.sampler, seed=config.seed, pricer=pricer, say=state.say)
        proposals.remember([*warm_start.records, *state.candidates])
        parts = StudyParts(
            config=config,
            log=log,
            space=space,
            jobs=jobs,
            ledger=ledger,
            settings=settings,
            state=state,
            trainer=trainer,
            admission=admission,
            warm_start=warm_start,
            weights=weights,
            budget=budget,
            later=later,
            proposals=proposals,
            side_by_side=shares.side_by_side,
        )

        def commit(step: GrownAxis) -> None:
            settings.note(grown=(*settings.head.grown, step), axes=ordered_axes(space))
            proposals.take_wider_space()

        growth = Growth(
            space=space,
            state=state,
            admission=admission,
            job_of=jobs.of_candidate,
            minutes=config.minutes,
            commit=commit,
        )
        candidates = CandidateSource(
            parts, starts=starts["points"], growth=growth, outside=_outside(parts, proposer)
        )
        # before anything trains: the cluster's ranks can share the baseline's batch, and something fits
        admission.plan(jobs.of_baseline({}))
        if not state.candidates:
            check_some_tables_fit(pricer)
            check_some_fit(
                pricer, settings.clusters[0], lambda candidate: admission.plan(jobs.of_candidate(candidate))
            )
        runner = TrialRunner(parts, sharing)
        study = StudyDriver(
            parts, candidates, runner, Finalizer(parts, runner, average_seeds=average_seeds), rule
        )
        if sharing is not None:
            ledger.settle(settings.setting)  # what a dead driver has left is written at once
            sharing.begin(
                study.follow,
                lambda driver, trial: without_driver(trial, executed.strategy(trial), driver),
                state.say,
            )
        undone.pop_all()
        return study


def _check(config: StudyConfig, space: Space, log: PreparedLog) -> None:
    """Checks that the settings go together, before anything is opened."""
    check_training_axes(space, config.training)
    check_order(log.features, config.training)
    if ranks_here(config) > 1 and log.features.tables:
        check_torchrec()
    if config.tune_trials:
        check_tunable(space)
    if config.next_period is not None:
        check_periods(log, config.next_period, most_ranks(config))
    if config.origins:
        check_origins(log, config.origins)
    if config.confirm_seeds[0] == config.confirm_seeds[1] > 0 or config.block_by:
        blocks_of(log, log.split(SPLIT), config.block_by)


def _passes(config: StudyConfig, baseline: Baseline, settings: StudySettings) -> PassFinder:
    """The number of passes as far as it is known: found by an earlier session, given, or that of an earlier
    study."""
    found, of_tables = settings.head.passes, not settings.head.undecayed_under
    training = baseline.training
    if found is None and training.epochs != "auto":
        found = FoundPasses(passes=training.epochs, reason="as many as the baseline's settings say")
    elif found is None and config.warm_start:
        earlier = config.warm_start[0]
        reason = f"as many as in {earlier}"
        found = known_passes(read_study(Path(earlier)), reason, schedule=training.schedule)
    if found is not None and not of_tables:
        found = found.replace(decays=without_tables(found.decays))
    if config.training.epochs == "auto":
        settings.head = settings.head.replace(passes=found)
    return PassFinder(training, minutes=config.minutes, found=found, of_tables=of_tables)


def _undecayed(
    config: StudyConfig, space: Space, baseline: Baseline, trainer: Trainer, admission: Admission
) -> str | None:
    """The technique for which the study does not try decay of whole tables: that of the baseline as given, or with
    the longest embeddings that the study tries; None if the decay may be tried, or would not be."""
    training, axis = baseline.training, space.model_axes.get("embedding_dim")
    if training.table_decay or (training.epochs != "auto" and OF_TABLES not in space.training_axes):
        return None
    lengths = () if axis is None else axis.values if isinstance(axis, ChoiceAxis) else (axis.high,)
    own, others = baseline.model.embedding_dim, () if baseline.incumbent else MODEL_AXES["embedding_dim"]
    for length in dict.fromkeys((own, max((own, *lengths, *others)))):
        try:
            model, _ = baseline.at({"embedding_dim": length})
        except UserError:  # a baseline whose heads, say, do not divide it
            continue
        job = trainer.job(model, training, config.seed)
        if (technique := excludes_decay_of_tables(job, admission.plan)) is not None:
            return technique
    return None


def _outside(parts: StudyParts, proposer: Proposer | None) -> OutsideProposals | None:
    """Proposals from outside, refused ones of which are noted in the study's head; None if there are none."""
    settings, state = parts.settings, parts.state
    if proposer is not None:
        taken = sum(trial.origin.proposal is not None for trial in state.candidates)
        lines = lines_of_function(proposer, taken + len(state.head.refused))
    elif parts.config.proposals:
        lines = lines_of_file(Path(parts.config.proposals))
    else:
        return None

    def refuse(refusal: RefusedProposal) -> None:
        settings.note(refused=(*settings.head.refused, refusal))

    return OutsideProposals(
        lines=lines,
        space=parts.space,
        state=state,
        admission=parts.admission,
        job_of=parts.jobs.of_candidate,
        refuse=refuse,
    )
