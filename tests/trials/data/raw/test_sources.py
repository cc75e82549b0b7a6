from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dhen.errors import UserError
from trials.data.raw.files import Format
from trials.data.raw.sources import CRITEO_COLUMNS, estimate_rows, open_log

CRITEO_LINE = (
    "1\t" + "\t".join(["5", "", "-1", *["0"] * 10]) + "\t" + "\t".join(["68fd1e64", "", *["0a1b2c3d"] * 24])
)
AVAZU_HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
AVAZU_LINE = (
    "10000094,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,ddd2926e,"
)
AVAZU_LINE += "44956a24,1,2,15706,320,50,1722,0,35,-1,79"


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("log.csv", "a,click\n1,0\n", Format.CSV),
        ("log.txt", "a,click\n1,0\n", Format.CSV),
        ("log.tsv", "a\tclick\n1\t0\n", Format.TSV),
        ("part-0", "a\tclick\n1\t0\n", Format.TSV),
        ("train.txt", f"{CRITEO_LINE}\n{CRITEO_LINE}\n", Format.CRITEO),
        ("unlabelled.txt", f"{CRITEO_LINE[2:]}\n", Format.CRITEO),
        ("train.csv", f"{AVAZU_HEADER}\n{AVAZU_LINE}\n", Format.AVAZU),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_text_formats_are_found(tmp_path: Path, name: str, text: str, expected: Format, packed: bool) -> None:
    path = written(tmp_path / name, gzip.compress(text.encode()) if packed else text)
    assert open_log([path]).format is expected


@pytest.mark.parametrize("packed", [False, True])
def test_parquet_is_found_by_content(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "data"
    pq.write_table(pa.table({"click": [0, 1, 0]}), path)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    log = open_log([path])
    assert (log.format, log.columns, estimate_rows(log)) == (Format.PARQUET, ("click",), 3)


def test_columns_of_a_header(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf"user\nid", caf\xc3\xa9 ,,click\r\n'
    assert open_log([written(tmp_path / "log.csv", text)]).columns == (
        "user\nid",
        "café",
        "column_3",
        "click",
    )
    assert open_log([written(tmp_path / "semicolon.csv", "a;click\n1;0\n")]).columns == ("a", "click")
    latin = written(tmp_path / "latin.csv", "café;click\n1;0\n".encode("latin-1"))
    assert open_log([latin]).columns == ("café", "click")


def test_criteo_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "train.txt", CRITEO_LINE + "\n")
    assert open_log([path]).columns == CRITEO_COLUMNS
    assert open_log([written(path, CRITEO_LINE[2:] + "\n")]).columns == CRITEO_COLUMNS[1:]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    for name in ("day-2.csv", "day-1.csv", "_SUCCESS", ".hidden"):
        written(folder / name, "a,click\n1,0\n")
    log = open_log([folder])
    assert [file.path.name for file in log.files] == ["day-1.csv", "day-2.csv"]
    assert log.name == "days"


def test_a_folder_of_folders_as_spark_writes_it(tmp_path: Path) -> None:
    """Names of folders hold columns; a row's own of the same name goes before."""
    for name, text in {
        "dt=2026-11-02/part-0.csv": "a,click\n2,1\n",
        "dt=2026-11-01/part-0.csv": "a,click\n1,0\n",
        "dt=__HIVE_DEFAULT_PARTITION__/part-0.csv": "a,click\n3,1\n",
        "dt=2026-11-01/_temporary/part-0.csv": "never finished",
        "_SUCCESS": "",
    }.items():
        path = tmp_path / "clicks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    log = open_log([tmp_path / "clicks"])
    assert [file.name for file in log.files][:2] == ["dt=2026-11-01/part-0.csv", "dt=2026-11-02/part-0.csv"]
    assert (log.name, log.columns) == ("clicks", ("a", "click", "dt"))
    assert [file.partition["dt"] for file in log.files] == ["2026-11-01", "2026-11-02", None]
    assert open_log([log.files[0].path]).columns == ("a", "click")
    own = written(tmp_path / "clicks" / "dt=2026-11-01" / "part-0.csv", "dt,a,click\nmine,1,0\n")
    assert open_log([own.parents[1]]).files[0].columns == ("dt", "a", "click")


def test_several_files_share_their_common_columns(tmp_path: Path) -> None:
    one, two = (
        written(tmp_path / "1.csv", "a,b,click\n1,2,0\n"),
        written(tmp_path / "2.csv", "click,a\n0,1\n"),
    )
    assert open_log([one, two]).columns == ("a", "click")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("\n\n", "no header and no rows"),
        ("1,0,3\n4,1,6\n", "first line may be a header or a row"),
        ('\rY""\n1,0\n', "first line may be a header or a row"),
        ("click,a\r0,1\r1,2\r", "carriage returns alone"),
        ('{"click": 1, "user": "a"}\n{"click": 0}\n', r"the text is JSON.* pyarrow\.json"),
        ("a,click\n".encode("utf-16"), "UTF-16"),
        (
            b"\x00\x01\x02\x03",
            r"neither text nor Parquet\. Known formats: .* plain or by gzip, bz2, zstd, lz4",
        ),
        (b"PK\x03\x04\x14\x00\x00", "a ZIP archive, which is not read: unpack it"),
        (lzma.compress(b"a,click\n1,0\n"), "compressed by xz, which is not read"),
        (gzip.compress(b"a,click\n" * 1000, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_files_that_are_no_log(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_log([written(tmp_path / "log.csv", text)])


def test_sources_that_are_no_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        open_log([tmp_path / "absent.csv"])
    with pytest.raises(UserError, match="holds no files"):
        open_log([tmp_path])
    path = written(tmp_path / "log.csv", "a,click\n1,0\n")
    with pytest.raises(UserError, match="Did you mean 'csv'"):
        open_log([path], "cvs")
    with pytest.raises(UserError, match="not a readable Parquet"):
        open_log([path], "parquet")
    with pytest.raises(UserError, match="first line has 1"):
        open_log([path], "criteo")
    twice = pa.table([[0], [1]], names=["click", "click"])
    pq.write_table(twice, tmp_path / "twice.pq")
    with pytest.raises(UserError, match="it names 'click' more than once"):
        open_log([tmp_path / "twice.pq"])
    (tmp_path / "twice.pq").unlink()
    pq.write_table(pa.table({"click": [0]}), tmp_path / "log.parquet")
    with pytest.raises(UserError, match=r"log.csv is csv, log.parquet is parquet"):
        open_log([tmp_path])


@pytest.mark.parametrize("compression", ["gzip", "bz2", "zstd", "lz4"])
def test_compressed_files_whatever_they_are_called(tmp_path: Path, compression: str) -> None:
    text, path = "a,click\n" + "12345,0\n" * 50_000, tmp_path / "log"
    with pa.output_stream(str(path), compression=compression) as stream:
        stream.write(text.encode())
    log = open_log([path])
    assert (log.format, log.columns) == (Format.CSV, ("a", "click"))
    assert log.files[0].where(7) == f"{path}, line 9"
    assert estimate_rows(log) == pytest.approx(50_000, rel=0.25)


def test_rows_are_estimated(tmp_path: Path) -> None:
    text = "a,click\n" + "12345,0\n" * 50_000
    assert estimate_rows(open_log([written(tmp_path / "log.csv", text)])) == pytest.approx(50_000, rel=0.01)
