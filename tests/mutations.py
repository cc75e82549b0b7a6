"""Sixty mutations, one a promise: `python tests/mutations.py` breaks each on purpose and sees a test fail.

    python tests/mutations.py                    all, one after another
    python tests/mutations.py shortcut ledger    those whose names contain one of these
    python tests/mutations.py --list             what there is
    python tests/mutations.py --unmutated        the named tests on the code as it is, which all must pass

Each is applied to a copy of the checkout, and the tests that it names run alone. It is caught if a test's own
assertion fails. An exception that comes out of the product, or keeps a test from being collected, is an error of
the mutation. The exit code is 1 if any is missed or in error. `tests/test_mutations.py` holds the list to the code
as it moves: if you rewrite a line that a mutation names, give the mutation its new place.

Tests run in forks of one process that has imported torch and the like, and nothing of ours: it saves ten seconds
for each.

On 2026-11-29 all 60 ran, in four minutes on two cores beside other work, and all 60 were caught. Before that, the
fitting tests missed eight: calibration, negative sampling (a study of a minute caught these two), the ledger's
order, a reason's largest part, a start point, the tables' warm-up, NE on test, data and tensor in the mesh. A
flipped bit in a checkpoint's tensors ended in an error of torch's. They have tests now, and so have a token,
parts of ZeRO and staleness, which only servers and ranks had. No mutation here starts ranks, studies or
browsers: what ranks add up is mutated where threads stand for them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("dhen", "spaces", "trials", "dashboards", "search", "tests", "docs", "examples", "benchmarks")
HEAVY = """
numpy torch torch.distributed.checkpoint torch.distributed.tensor torch.distributed.fsdp torch._dynamo
torch.nn.parallel torch.testing pandas pyarrow.parquet pyarrow.csv pyarrow.dataset pydantic duckdb
sqlalchemy.orm alembic.command scipy.stats scipy.special plotly.graph_objects optuna mlflow
hypothesis.strategies jinja2 rich.console starlette.applications uvicorn
click.testing safetensors.torch fsspec yaml filelock
"""
"""Modules that tests need, whoever wrote them but us."""
PATIENCE_S = 300
"""For the tests of one mutation: some hang."""


@dataclass(frozen=True)
class Mutation:
    """A promise, and a way to break it."""

    name: str
    file: str
    old: str
    """Stands in the file once."""
    new: str
    tests: str
    """Files, or nodes as pytest names them, between spaces."""


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "a layer's shortcut is dropped",
        "dhen/dhen_model.py",
        "y = y + self.shortcut(x_BMD)",
        "y = y + 0.0",
        "tests/dhen/test_layer.py",
    ),
    Mutation(
        "example weights are left out of the loss",
        "dhen/members.py",
        "label_B, weight=weight_B)",
        "label_B, weight=None)",
        "tests/trials/training/test_local_step.py::test_fp32_is_plain_pytorch",
    ),
    Mutation(
        "a factorization machine counts each pair twice",
        "dhen/blocks/fm.py",
        "sums_BLD, sums_BLD, value=0.5)",
        "sums_BLD, sums_BLD, value=1.0)",
        "tests/dhen/blocks/test_blocks_math.py::test_fm_is_the_sum_over_pairs",
    ),
    Mutation(
        "NE is held against the base rate without weights",
        "trials/records/metrics.py",
        "np.average(label, weights=weight)",
        "np.average(label)",
        "tests/trials/test_metrics.py",
    ),
    Mutation(
        "calibration is inverted",
        "trials/records/metrics.py",
        "np.dot(p, weight) / np.dot(label, weight)",
        "np.dot(label, weight) / np.dot(p, weight)",
        "tests/trials/test_metrics.py",
    ),
    Mutation(
        "negative sampling is not undone in an evaluation",
        "trials/training/evaluation.py",
        "undo_negative_sampling(p, rate), label,",
        "p, label,",
        "tests/trials/training/test_evaluation.py",
    ),
    Mutation(
        "every pass has the first one's order",
        "trials/data/loader.py",
        "np.random.default_rng((seed, epoch))",
        "np.random.default_rng((seed, 0))",
        "tests/trials/data/test_order.py",
    ),
    Mutation(
        "the front has a dominated member",
        "search/selection.py",
        "if ne < lowest_ne or not front:",
        "if ne != lowest_ne or not front:",
        "tests/search/test_pareto.py",
    ),
    Mutation(
        "the baseline need not be beaten by what choosing made of the lowest NE",
        "search/analysis/choice.py",
        "noise_C[0] += optimism",
        "noise_C[0] += 0.0 * optimism",
        "tests/search/analysis/test_choice.py",
    ),
    Mutation(
        "a confidence interval is too narrow",
        "search/analysis/statistics.py",
        "stdtrit(self.degrees, 0.5 + CONFIDENCE / 2)",
        "stdtrit(self.degrees, CONFIDENCE)",
        "tests/search/analysis/test_bootstrap.py::test_interval_p_and_detectable_agree_with_students_t",
    ),
    Mutation(
        "a candidate without a result counts as trained",
        "search/selection.py",
        "(result := trial.result).outcome is Outcome.COMPLETED",
        "(result := trial.result) is not None",
        "tests/search/test_pareto.py",
    ),
    Mutation(
        "a sampler is not told what does not fit",
        "search/samplers/ask_tell.py",
        "excesses = {MEMORY: record.plan.memory_excess,",
        "excesses = {MEMORY: None,",
        (
            "tests/search/samplers/test_ask_tell.py::"
            "test_a_candidate_that_was_taken_in_while_it_ran_does_not_fit_once_it_has_shown_so"
        ),
    ),
    Mutation(
        "a driver that beats is taken for dead",
        "trials/store/leases.py",
        "(other.beats, since if beats == other.beats else now)",
        "(other.beats, since)",
        "tests/trials/storage/test_leases.py::test_who_beats_lives_and_who_could_not_look_waits_anew",
    ),
    Mutation(
        "a trial's lease is had by two drivers",
        "trials/store/leases.py",
        "return connection.scalar(sa.select(LEASES.c.driver).where(its)) == self.driver",
        "return connection.scalar(sa.select(LEASES.c.driver).where(its)) is not None",
        "tests/trials/storage/test_leases.py::test_one_driver_has_a_lease_until_it_lets_go",
    ),
    Mutation(
        "damaged weights are believed",
        "trials/store/weights.py",
        "if noted not in (None, _digest(weights)):",
        "if noted not in (None, noted):",
        "tests/trials/storage/test_kept_files.py::test_a_flipped_bit_of_weights_is_found",
    ),
    Mutation(
        "a damaged checkpoint is believed",
        "trials/training/checkpoint_files.py",
        "if file_hash(folder / name) != expected:",
        "if not expected:",
        "tests/distributed/test_checkpoint_resume.py::test_a_flipped_bit_of_any_file_is_found",
    ),
    Mutation(
        "moments of the optimizer are not restored from a checkpoint",
        "trials/optim/adamw.py",
        "return {moment: state[moment] for moment in MOMENTS}",
        "return {moment: state[moment].clone() for moment in MOMENTS}",
        (
            "tests/trials/training/test_local_step.py::"
            "test_a_checkpoint_goes_on_where_weights_are_aligned_otherwise"
        ),
    ),
    Mutation(
        "the cache of rows loses what it gives away",
        "trials/training/embeddings/levels.py",
        "self._write_back(slots[self._changed_C[slots]])",
        "self._write_back(slots[:0])",
        "tests/trials/embeddings/levels/test_cached_tables.py",
    ),
    Mutation(
        "rows are evicted that are seen most",
        "trials/training/embeddings/growing.py",
        "kept = (worth <= worth.kthvalue(wanted).values)",
        "kept = (-worth <= (-worth).kthvalue(wanted).values)",
        "tests/trials/embeddings/test_growing.py::test_lru_takes_the_rows_of_those_not_seen_for_longest",
    ),
    Mutation(
        "rows outlive their time",
        "trials/training/embeddings/growing.py",
        "taken[self._seen_at[taken] <= now - time]",
        "taken[self._seen_at[taken] <= now - 2 * time]",
        (
            "tests/trials/embeddings/test_growing.py::"
            "test_ttl_takes_back_the_rows_of_those_not_seen_for_so_long_by_time_stamps"
        ),
    ),
    Mutation(
        "a row that goes to another id keeps its optimizer state",
        "trials/training/embeddings/growing.py",
        "sum_R.index_fill_(0, rows, 0.0)",
        "sum_R.index_fill_(0, rows[:0], 0.0)",
        (
            "tests/trials/embeddings/test_growing.py::"
            "test_a_row_that_goes_to_another_id_forgets_weights_and_optimizer_state"
        ),
    ),
    Mutation(
        "data and tensor ranks are swapped in the mesh",
        "trials/training/distributed/tensor_parallel.py",
        "mesh_dim_names=(STAGES, DATA, TENSOR)",
        "mesh_dim_names=(STAGES, TENSOR, DATA)",
        "tests/distributed/test_tensor_parallel.py::test_tensor_ranks_are_neighbours_and_stages_far_apart",
    ),
    Mutation(
        "a weighted sum leaves out a module's weight",
        "dhen/ensembles/ensembles.py",
        "total = total + weight * output",
        "total = total + output",
        "tests/dhen/blocks/test_paper_formulas.py::test_a_weighted_sum_has_a_weight_per_module",
    ),
    Mutation(
        "a linear map costs half of its FLOPs",
        "dhen/cost.py",
        "flops=2.0 * n_in * n_out * positions",
        "flops=1.0 * n_in * n_out * positions",
        "tests/contracts/test_ensembles.py",
    ),
    Mutation(
        "two ranks see the same example",
        "trials/records/strategy.py",
        "return slice(size * rank // ranks, size",
        "return slice(max(0, size * rank // ranks - 1), size",
        "tests/trials/data/test_loader.py::test_slices_of_ranks_follow_one_another",
    ),
    Mutation(
        "vocabularies learn from validation",
        "trials/data/prepare/fit.py",
        "first_open, batch) == TRAIN",
        "first_open, batch) >= TRAIN",
        "tests/trials/data/encoding/test_encoding.py::test_nothing_is_learnt_from_later_rows",
    ),
    Mutation(
        "rows at the moment of a cut are trained on",
        "trials/data/prepare/splits.py",
        "splits[is_open] = (position >= self.starts[0])",
        "splits[is_open] = (position > self.starts[0])",
        "tests/trials/data/prepare/test_splits.py",
    ),
    Mutation(
        "the named positive is the negative",
        "trials/data/raw/typed.py",
        "canonical(value) == self._positive)",
        "canonical(value) != self._positive)",
        "tests/trials/data/raw/test_labels.py",
    ),
    Mutation(
        "a point is encoded off by one",
        "spaces/axes.py",
        "index(self.decode(received)) - self.ascending",
        "index(self.decode(received)) - 1 - self.ascending",
        "tests/spaces/test_widen.py::test_optuna_sees_ordered_choices_as_numbers_that_stay",
    ),
    Mutation(
        "more techniques are chosen where they are faster",
        "trials/planner/ladder.py",
        "return len(strategy.techniques), strategy.ways_to_cut, seconds",
        "return 0, 0, seconds",
        "tests/search/planning/test_attempts.py",
    ),
    Mutation(
        "a reason names what takes least",
        "trials/planner/sentences.py",
        "for key, word in PARTS.items()), reverse=True)",
        "for key, word in PARTS.items()))",
        "tests/trials/planner/test_plan.py::test_reasons_name_the_bytes_and_what_takes_most",
    ),
    Mutation(
        "a reason names the wrong technique as the closest",
        "trials/planner/plan.py",
        "closest = min(unfit, key=lambda one: one.lacking_bytes)",
        "closest = max(unfit, key=lambda one: one.lacking_bytes)",
        (
            "tests/search/planning/test_shapes.py::"
            "test_where_nothing_fits_the_shape_that_lacks_least_is_planned_and_all_are_told"
        ),
    ),
    Mutation(
        "the next technique needs as much as what ran out of memory",
        "search/execution/attempts.py",
        "priced.memory.total <= total - lacking",
        "priced.memory.total <= total",
        "tests/search/planning/test_attempts.py",
    ),
    Mutation(
        "a plan has every rank hold all masters of ZeRO",
        "trials/planner/zero_memory.py",
        "FP32_BYTES * sum(parts)\n",
        "FP32_BYTES * ranks * sum(parts)\n",
        "tests/trials/planner/test_zero_accounts.py",
    ),
    Mutation(
        "a ring's all-reduce sends half of its bytes",
        "trials/planner/collectives.py",
        "2 * sum(in_ring), 2 * gather.beta)",
        "2 * sum(in_ring), gather.beta)",
        "tests/trials/planner/test_collectives.py",
    ),
    Mutation(
        "equal jobs are trained twice",
        "search/study/trial_runner.py",
        "elif trained is not None and trained.owner != record.number:",
        "elif trained is not None and trained.owner == record.number:",
        (
            "tests/search/study/test_trial_runner.py::"
            "test_of_two_equal_jobs_the_second_shares_what_has_ended_before_it_came_up"
        ),
    ),
    Mutation(
        "a sampler is told twice",
        "search/study/trial_runner.py",
        "            self._decisions.proposals.tell(record)\n",
        "            self._decisions.proposals.tell(record)\n" * 2,
        (
            "tests/search/study/test_trial_runner.py::"
            "test_a_trial_ends_as_its_processes_say_and_is_recorded_and_told_once"
        ),
    ),
    Mutation(
        "others are told before the ledger has it",
        "search/study/trial_runner.py",
        "        self._ledger.save(record)\n        self._state.note(record)",
        "        self._state.note(record)\n        self._ledger.save(record)",
        "tests/search/study/test_trial_runner.py",
    ),
    Mutation(
        "a trial that was killed is not tried again",
        "search/execution/reduce_events.py",
        "(MOST_HOSTS_LOST if elsewhere else 1)",
        "(MOST_HOSTS_LOST if elsewhere else 0)",
        "tests/search/study/test_trial_runner.py::test_what_is_killed_is_tried_once_more_and_not_twice",
    ),
    Mutation(
        "a search has one candidate more than was asked for",
        "search/execution/budget.py",
        "len(untuned(self._state.candidates)) >= trials",
        "len(untuned(self._state.candidates)) > trials",
        (
            "tests/search/budget/test_budget.py::"
            "test_the_search_is_over_with_as_many_candidates_as_were_asked_for"
        ),
    ),
    Mutation(
        "a stopping rule gives up what may still come to the front",
        "search/samplers/stopping.py",
        "if not rival_ne <= expected.low:",
        "if not rival_ne <= expected.ne:",
        (
            "tests/search/stopping/test_stopping.py::"
            "test_curves_on_a_clean_set_stop_the_dominated_and_no_other"
        ),
    ),
    Mutation(
        "averages are valued by the sum of their members' probabilities",
        "search/analysis/averages.py",
        "np.maximum(p_N / len(members), PROBABILITY_FLOOR)",
        "np.maximum(p_N, PROBABILITY_FLOOR)",
        "tests/search/averages/test_greedy_selection.py",
    ),
    Mutation(
        "a damaged file of a bundle is believed",
        "search/bundles/increments.py",
        "if file_hash(folder / name) != expected:",
        "if not expected:",
        "tests/search/bundles/test_increments.py::test_what_is_missing_or_altered_in_the_folder_is_said",
    ),
    Mutation(
        "a bundle's rate may be any number",
        "search/bundles/bundle.py",
        "negative_sampling_rate: float = Field(default=1.0, gt=0, le=1)",
        "negative_sampling_rate: float = Field(default=1.0)",
        "tests/search/bundles/test_checked_bundle.py::test_a_rate_that_is_none_is_refused",
    ),
    Mutation(
        "a score that is no probability is given",
        "search/bundles/scorer.py",
        "good_B = (p_B >= 0.0) & (p_B <= 1.0)",
        "good_B = np.ones(len(p_B), bool)",
        "tests/search/bundles/test_checked_bundle.py::test_rows_before_count_in_the_message",
    ),
    Mutation(
        "columns that the model has not are built of a request",
        "search/serving/requests.py",
        "    present = [column for column in inputs if any(column in row for row in rows)]",
        "    present = sorted({column for row in rows for column in row})",
        "tests/search/bundles/test_checked_bundle.py::test_only_columns_of_the_model_are_built",
    ),
    Mutation(
        "no token is as good as the right one",
        "search/http.py",
        "return hmac.compare_digest(digest(given), expected_digest)",
        "return hmac.compare_digest(digest(given), expected_digest) or not given",
        "tests/search/test_http.py::test_only_the_whole_token_opens",
    ),
    Mutation(
        "a start point is proposed twice",
        "search/study/reuse.py",
        "if not any(point.items() <= known for known in tried)",
        "if not any(point.items() < known for known in tried)",
        "tests/search/reuse/test_start_points.py::test_a_start_point_is_taken_once",
    ),
    Mutation(
        "an ablation has the wrong sign",
        "dashboards/figures/worth.py",
        "return Estimate(label, -without.mean,",
        "return Estimate(label, without.mean,",
        "tests/dashboards/figures/test_worth.py::test_ablations_say_what_each_part_brings",
    ),
    Mutation(
        "names are markup on the page",
        "dashboards/report/page.py",
        "autoescape=True",
        "autoescape=False",
        "tests/dashboards/report/test_page.py::test_nothing_from_data_is_markup",
    ),
    Mutation(
        "a name ends the page's script",
        "dashboards/report/embed.py",
        'text.replace("<", "\\\\u003c")',
        "text",
        "tests/dashboards/report/test_embed.py::test_json_in_a_script_cannot_end_it",
    ),
    Mutation(
        "a password is not masked",
        "trials/store/database.py",
        'r"\\1:***@"),',
        'r"\\g<0>"),',
        "tests/trials/storage/test_leases.py::test_no_password_is_shown",
    ),
    Mutation(
        "the rank that failed last is blamed",
        "trials/runtime/rank_process.py",
        "return 1, self.words.unix_seconds",
        "return 1, -self.words.unix_seconds",
        "tests/trials/processes/test_post_mortem.py",
    ),
    Mutation(
        "row-wise Adagrad sums squares in place of their mean",
        "trials/optim/rowwise_adagrad.py",
        "gradient_RD.square().mean(dim=1)",
        "gradient_RD.square().sum(dim=1)",
        "tests/trials/optim/test_rowwise_adagrad.py",
    ),
    Mutation(
        "the tables' learning rate is warmed up",
        "trials/training/schedule.py",
        "return factor * warmup, factor",
        "return (factor * warmup,) * 2",
        "tests/trials/training/test_local_step.py::test_a_warm_up_is_of_the_dense_part_alone",
    ),
    Mutation(
        "ZeRO's ranks own overlapping parts",
        "trials/training/distributed/zero.py",
        "self.begin = min(group.rank * part, self.length)",
        "self.begin = min(group.rank * (part - 1), self.length)",
        "tests/distributed/test_one_rank.py::test_every_weight_of_a_bucket_has_one_owner",
    ),
    Mutation(
        "the front is of NE on test",
        "search/selection.py",
        "return trial.result.validation.ne",
        "return (trial.result.test or trial.result.validation).ne",
        (
            "tests/search/test_pareto.py::"
            "test_trials_without_a_result_are_left_out_and_scores_on_test_decide_nothing"
        ),
    ),
    Mutation(
        "rows are twice as stale as is allowed",
        "trials/training/servers/synchrony.py",
        "self._version >= step - self._staleness)",
        "self._version >= step - 2 * self._staleness)",
        "tests/trials/servers/test_synchrony.py",
    ),
    Mutation(
        "ranks that split a module do not add up the gradients of its input",
        "dhen/ops/linear.py",
        "ctx.group.sum_(gradient_x)",
        "ctx.group.gather(gradient_x)",
        "tests/contracts/test_blocks.py::test_ranks_that_split_it_compute_what_one_does",
    ),
    Mutation(
        "gradients of micro-batches are summed in place of averaged",
        "trials/training/distributed/parallelize.py",
        "share=weight * (stop - start) / size)",
        "share=weight)",
        "tests/trials/training/test_micro_batches.py",
    ),
)


class Failures:
    """A plugin of pytest: what the first failure was."""

    def __init__(self, root: Path) -> None:
        self.root, self.kind, self.words, self.passed = root, "missed", "", 0

    def pytest_runtest_logreport(self, report: object) -> None:
        """A promise whose tests were all skipped was not looked at."""
        self.passed += report.when == "call" and report.passed  # type: ignore[attr-defined]

    def pytest_exception_interact(self, node: object, call: object, report: object) -> None:
        """Only an assertion that a test itself makes says that a promise is broken."""
        if self.words:
            return  # what comes after it, as tests are torn down
        error: BaseException = call.excinfo.value  # type: ignore[attr-defined]
        while isinstance(error, BaseExceptionGroup):  # of several examples of Hypothesis
            error = error.exceptions[0]
        ours, frame = list[str](), error.__traceback__
        while frame is not None:
            path = Path(frame.tb_frame.f_code.co_filename)
            if path.is_relative_to(self.root):
                ours.append(path.relative_to(self.root).parts[0])
            frame = frame.tb_next
        said = f"{type(error).__name__}: {error}".strip()
        asserted = isinstance(error, AssertionError) or said.startswith("Failed: DID NOT RAISE")
        own = getattr(report, "when", "collect") == "call" and ours[-1:] == ["tests"]
        self.kind = "caught" if asserted and own else "error"
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        self.words = f"{getattr(node, 'name', node)}: {lines[0]}"


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[str, str]:
    """What came of these tests in the copy: caught, missed or error, and the words of the failure."""
    result = copy / "result.json"
    result.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            _in_fork(copy, tests, result)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # nothing that belongs to the parent is cleaned up
    end = time.monotonic() + PATIENCE_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "error", f"not done after {PATIENCE_S} s"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what tests have left running
    if not result.exists():
        last = (copy / "output.txt").read_text().strip().splitlines()[-1:]
        return "error", f"the process of the tests died: {' '.join(last)}"
    kind, words = json.loads(result.read_text())
    return kind, words


def _in_fork(copy: Path, tests: Sequence[str], result: Path) -> None:
    os.setsid()
    os.chdir(copy)
    output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:] = [
        str(copy),
        *(part for part in sys.path if Path(part).resolve() not in (ROOT, ROOT / "tests")),
    ]
    import pytest

    seen = Failures(copy)
    # of plugins of pytest that were imported before, and need no rewriting
    quietly = "ignore::pytest.PytestAssertRewriteWarning"
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", quietly, *tests], plugins=[seen])
    if (code != 0 and seen.kind == "missed") or code not in (0, 1):
        seen.kind, seen.words = "error", seen.words or f"pytest ended with {code!r}"
    if seen.kind == "missed" and not seen.passed:
        seen.kind, seen.words = "error", "no test ran"
    result.write_text(json.dumps([seen.kind, seen.words]))


@contextlib.contextmanager
def mutated(copy: Path, mutation: Mutation) -> Iterator[None]:
    """The copy with this mutation, for as long as the context lasts."""
    path = copy / mutation.file
    text = path.read_text()
    compiled = Path(importlib.util.cache_from_source(str(path)))
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.old!r} stands {text.count(mutation.old)} times in {mutation.file}"
        )
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        compiled.unlink(missing_ok=True)  # it may seem to be of the new text: same second, same length
        yield
    finally:
        path.write_text(text)
        compiled.unlink(missing_ok=True)


def main() -> int:
    """Runs those that are asked for."""
    parser = argparse.ArgumentParser(description="Breaks promises on purpose and sees tests fail.")
    parser.add_argument("names", nargs="*", help="parts of names; all where none is given")
    parser.add_argument("--list", action="store_true", help="only show them")
    parser.add_argument("--unmutated", action="store_true", help="run the named tests on the code as it is")
    asked = parser.parse_args()
    chosen = [one for one in MUTATIONS if not asked.names or any(part in one.name for part in asked.names)]
    if asked.list:
        for one in chosen:
            print(f"{one.name}\n    {one.file}: {one.tests}")
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder).resolve()
        # rewritten tests, which name the files that they were made of
        ignored = shutil.ignore_patterns("*-pytest-*.pyc")
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        for path in [*ROOT.glob("*.md"), *ROOT.glob("*.yml"), ROOT / "pyproject.toml", ROOT / "Makefile"]:
            shutil.copy2(path, copy / path.name)
        os.environ["PYTHONPATH"] = str(copy)
        for module in HEAVY.split():
            importlib.import_module(module)
        if asked.unmutated:
            tests = list(dict.fromkeys(test for one in chosen for test in one.tests.split()))
            kind, words = run_tests(copy, tests)
            print("all pass" if kind == "missed" else f"{kind}: {words}")
            return int(kind != "missed")
        kinds = []
        for one in chosen:
            begun = time.monotonic()
            with mutated(copy, one):
                kind, words = run_tests(copy, one.tests.split())
            kinds.append(kind)
            seconds = time.monotonic() - begun
            print(
                f"{'**missed**' if kind == 'missed' else kind:10} {seconds:4.0f} s  {one.name}  {words}",
                flush=True,
            )
    caught = kinds.count("caught")
    print(f"{caught} of {len(kinds)} caught, {kinds.count('missed')} missed, {kinds.count('error')} in error")
    return int(caught < len(kinds))


if __name__ == "__main__":
    sys.exit(main())
