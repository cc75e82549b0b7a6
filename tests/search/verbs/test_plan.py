"""`dhen-search plan`: the table with its reasons, the documented JSON, the figure, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run

from search.cli import main

CONFIG: dict[str, Any] = {
    "model": {
        "embedding_dim": 64,
        "layers": [{"modules": ["dlrm", "linear"], "out_embeddings": 32}] * 3,
    },
    "schema": {
        "tables": [
            {"name": "site", "rows": 100_000},
            {"name": "user", "rows": 2_000_000},
            {"name": "tags", "rows": 10_000, "multi_hot": True, "mean_ids": 12},
        ],
        "numeric": 13,
    },
    "training": {"batch_size": 65536},
}


TWO_CLUSTERS = ("--cluster", "zionex", "--cluster", "h100")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("plan") / "model.yaml", CONFIG)


def written(path: Path, data: object) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def plans(dhen_search: Run, *words: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dhen_search("plan", *words, "--json").stdout)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one message of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, words)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


def test_the_table_says_what_is_chosen_and_why(dhen_search: Run, config: Path) -> None:
    words = ("plan", config, "--cluster", "zionex", "--ranks", "2x8")
    roomy = dhen_search(*words).stdout
    (line,) = (line for line in roomy.splitlines() if "fits, chosen" in line)
    assert line.split()[0] == "dp"
    assert "Unverified" in roomy
    (needed,) = (each for each in plans(dhen_search, *words[1:]))
    hbm = needed["strategies"][0]["memory"]["total"] - 1
    tight = dhen_search(*words, "--hbm", str(hbm)).stdout
    assert "dp needs" in tight  # why the cheaper one was not taken
    assert "lacks 1 B" in tight
    (line,) = (line for line in tight.splitlines() if "fits, chosen" in line)
    assert line.split()[0] != "dp"


def test_json_is_a_list_of_complete_plans(dhen_search: Run, config: Path) -> None:
    found = plans(dhen_search, config, *TWO_CLUSTERS)
    assert [each["cluster"] for each in found] == ["zionex", "h100"]
    for each in found:
        assert each["hosts"] * each["gpus_per_host"] * each["examples_per_rank"] == 65536
        assert not each["verified"]
        assert (each["precision"], each["batch_size"], each["chosen"]) == ("bf16", 65536, "dp")
        names = [strategy["name"] for strategy in each["strategies"]]
        assert len(set(names)) == len(names) > 20
        sizes = [len(strategy["techniques"]) for strategy in each["strategies"]]
        assert sizes == sorted(sizes)
        for strategy in each["strategies"]:
            held = strategy["memory"]
            assert sum(value for _, value in held["activations_by_layer"]) == held["activations"]
            assert strategy["examples_per_second"] == pytest.approx(65536 / strategy["step"]["total"])
            assert strategy["fits"] == (strategy["lacking_bytes"] == 0)
            assert strategy["reason"]


def test_nothing_fits_has_a_remedy(
    dhen_search: Run, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (config, "--cluster", "h100", "--ranks", "1x2")
    (roomy,) = plans(dhen_search, *words)
    least = min(strategy["memory"]["total"] for strategy in roomy["strategies"])
    words = (*words, "--hbm", str(least - 1))
    (found,) = plans(dhen_search, *words)
    assert found["chosen"] is None
    assert not any(strategy["fits"] for strategy in found["strategies"])
    text = dhen_search("plan", *words).stdout
    assert found["remedy"] in text
    assert "which comes closest" in text
    for technique in ("zero1", "zero1+micro_batches=4", "fsdp+no_sync"):
        words = (config, "--cluster", "zionex", "--ranks", "1x4", "--hbm", "1300MiB")
        assert "comes closest and lacks" in refused(capsys, *words, f"technique={technique}")


def test_servers_of_tables_are_planned(
    dhen_search: Run, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("training.tables.synchrony=semi", "servers=3")
    (found,) = plans(dhen_search, config, "--cluster", "zionex", "--ranks", "4x8", *asked)
    assert found["chosen"] == "dp+servers3"
    (chosen,) = (each for each in found["strategies"] if each["name"] == found["chosen"])
    assert chosen["step"]["servers"] > 0
    assert chosen["memory"]["servers"] > 0
    assert "3 servers" in chosen["reason"]
    assert "give training.tables.synchrony=" in refused(capsys, config, "servers=3")


def test_what_fits_never_depends_on_what_is_preferred(dhen_search: Run, config: Path) -> None:
    words = (config, "--cluster", "zionex", "--ranks", "2x8")
    (least,), (fastest,) = (plans(dhen_search, *words, "--prefer", which) for which in ("least", "fastest"))
    assert least["strategies"] == fastest["strategies"]
    fitting = [strategy for strategy in fastest["strategies"] if strategy["fits"]]
    quickest = min(fitting, key=lambda strategy: strategy["step"]["total"])
    assert fastest["chosen"] == quickest["name"]


def test_a_bundle_and_a_shipped_model_on_a_log(dhen_search: Run, study: Path, click_log: Path) -> None:
    (found,) = plans(dhen_search, study / "best", "--cluster", "h100", "--ranks", "1x4")
    assert found["chosen"] == "dp"
    (found,) = plans(dhen_search, study / "best", "training.batch_size=512")
    assert (found["cluster"], found["batch_size"]) == ("this", 512)
    (found,) = plans(
        dhen_search, "dcn_v2", "--data", click_log, "--cluster", "h100", "training.batch_size=128"
    )
    assert found["batch_size"] == 128
    words = ("--cluster", "h100", "training.batch_size=128", "model.embedding_dim=4")
    (changed,) = plans(dhen_search, "dcn_v2", "--data", click_log, *words)
    parameters = [each["strategies"][0]["memory"]["parameters"] for each in (found, changed)]
    assert parameters[1] < parameters[0]


def test_the_sweep_is_one_file_that_opens_anywhere(dhen_search: Run, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "depth.html"
    words = (config, "--cluster", "zionex", "--ranks", "2x8", "--sweep", "depth=1..6", "--out", out)
    said = dhen_search("plan", *words).stdout
    assert "dp: 6 layers" in said
    assert "hsdp: 6 layers" in said
    page = out.read_text()
    assert 'src="http' not in page
    assert "All fit up to 6 layers" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("{config}", "--cluster", "h1000"), "Did you mean 'h100'"),
        (("{config}", "--cluster", "h100", "--ranks", "16"), "such as 2x4"),
        (("{config}", "--cluster", "h100", "--hbm", "0"), "greater than 0"),
        (("{config}", "--cluster", "h100", "--hbm", "24 gigs"), "80GiB"),
        (("{config}", "--cluster", "h100", "--prefer", "cheapest"), "'least', 'fastest'"),
        (("{config}", "--cluster", "h100", "training.batch_size=4"), "batch"),
        (("{config}", "--cluster", "h100", "training.batch=4"), "Did you mean 'batch_size'"),
        (("{config}", "--cluster", "h100", "modle.dropout=0"), "Did you mean 'model'"),
        (("none.yaml", "--cluster", "h100"), "no configuration file"),
        (("dcn_v2", "--cluster", "h100"), "the key 'schema' is missing"),
        ((".", "--cluster", "h100"), "no bundle here"),
        (("{config}", "--sweep", "depth=1..4"), "--out"),
        (("{config}", "--out", "x.html"), "--sweep"),
        (("{config}", "--sweep", "depth=4..1", "--out", "x.html"), "such as depth=1..40"),
        (("{config}", "--sweep", "width=1..4", "--out", "x.html"), "such as depth=1..40"),
        (
            ("{config}", "technique=fsdp+no_sync", "--sweep", "depth=1..2", "--out", "x.html"),
            "give technique=fsdp, or none",
        ),
        (
            ("{config}", "technique=fsdp+cpu_offload", "--sweep", "depth=1..2", "--out", "x.html"),
            "nothing would be drawn for technique=fsdp+cpu_offload",
        ),
        (("{config}", "tecnique=dp"), "unknown key 'tecnique'. Did you mean 'technique'?"),
        (
            ("{config}", "nonsense.key=1"),
            "Known: columns, csv, demo, format, growing, hbm, label, memory_margin, model, prefer, ranks, ",
        ),
        (("{dlrm}", "--cluster", "h100", "--sweep", "depth=1..4", "--out", "x.html"), "has no layers"),
        (
            ("{config}", *TWO_CLUSTERS, "--sweep", "depth=1..4", "--out", "x.html"),
            "one cluster",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    dlrm = written(tmp_path / "dlrm.yaml", CONFIG | {"model": {"family": "advanced_dlrm"}})
    assert says in refused(capsys, *(word.format(config=config, dlrm=dlrm) for word in words))
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cluster": {}}, "unknown key 'cluster'"),
        ({"model": None}, "the key 'model' is missing"),
        ({"model": "dcn_v3"}, "Did you mean 'dcn_v2'"),
        ({"schema": {"tables": [{"name": "a", "rows": 0}]}}, "greater than 0"),
        ({"schema": {}}, "at least one feature column"),
        ({"schema": {"tables": [{"name": "a", "rows": 10**12}], "numeric": 1}}, "table 'a' fits on no rank"),
        ({"training": {"precision": "fp64"}}, "precision"),
    ],
    ids=str,
)
def test_files_with_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], says: str
) -> None:
    path = written(tmp_path / "bad.yaml", CONFIG | change)
    assert says in refused(capsys, path, "--cluster", "h100", "--ranks", "1x1")


def test_a_cluster_of_your_own(
    dhen_search: Run, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster,) = json.loads(dhen_search("clusters", "h100", "--json").stdout)
    own = written(tmp_path / "ours.yaml", cluster | {"hosts": 0})
    assert "hosts" in refused(capsys, config, "--cluster", own)
    written(own, cluster | {"name": "ours"})
    (found,) = plans(dhen_search, config, "--cluster", own)
    assert found["cluster"] == "ours"
