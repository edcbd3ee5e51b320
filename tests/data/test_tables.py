"""Rows of tables, whole and broken."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.data.tables import Row, as_weight, is_table, read_rows
from app.errors import BadInput

COLUMNS = [("text", "--text-column"), ("label", "--label-column")]


def rows_of(path: Path, content: str | bytes) -> list[Row]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(path, COLUMNS))


def test_a_csv_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    text = 'label,id,text\n1,a,"one, two"\n\n2,b,"three\nand ""four"""\n3,c,five\n'
    assert rows_of(tmp_path / "t.csv", text) == [
        Row("line 2", ("one, two", "1")),
        Row("line 4", ('three\nand "four"', "2")),
        Row("line 6", ("five", "3")),
    ]


def test_a_table_as_excel_saves_it(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "t.CSV", b"\xef\xbb\xbftext,label\r\nhi,1\r\n") == [Row("line 2", ("hi", "1"))]


def test_a_tsv(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "t.tsv", "text\tlabel\none, two\tx\n") == [Row("line 2", ("one, two", "x"))]


def test_an_empty_line_is_a_row_where_there_is_one_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text\none\n\ntwo\n")
    rows = read_rows(tmp_path / "t.csv", [("text", "--text-column")])
    assert [(row.where, row.values) for row in rows] == [("line 2", ("one",)), ("line 3", ("",)), ("line 4", ("two",))]


def test_a_long_text(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "t.csv", f"text,label\n{'word ' * 100_000},x\n")
    assert len(row.values[0]) == 500_000


def test_a_broken_row_has_an_error_and_the_next_is_read(tmp_path: Path) -> None:
    content = b'text,label\na,1\nb,1,2\nc\n"d"e,1\nf\xe9,1\ng,2\n"never closed,3\nh,4\n'
    assert rows_of(tmp_path / "t.csv", content) == [
        Row("line 2", ("a", "1")),
        Row("line 3", error="3 fields, and the header has 2"),
        Row("line 4", error="1 fields, and the header has 2"),
        Row("line 5", error="broken: ',' expected after '\"'"),
        Row("line 6", error="no UTF-8 (byte 0xe9); save the file as UTF-8"),
        Row("line 7", ("g", "2")),
        Row("line 8", error="broken: unexpected end of data"),
    ]


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "a", "label": 1, "id": 7}),
        "",
        '{"text": "b"}',
        "[1]",
        "{",
        '{"label": true, "text": null}',
    ]
    rows = rows_of(tmp_path / "t.jsonl", "\n".join(lines).encode() + b"\n\xff\n")
    assert rows[0] == Row("line 1", ("a", 1))
    assert rows[1] == Row("line 3", error="no label; there are text")
    assert rows[2] == Row("line 4", error="a JSON list, and not an object with columns as names")
    assert rows[3].error is not None
    assert rows[3].error.startswith("no JSON: ")
    assert rows[4] == Row("line 6", (None, True))
    assert rows[5].error == "no UTF-8 (byte 0xff); save the file as UTF-8"
    assert len(rows) == 6


def test_parquet(tmp_path: Path) -> None:
    count = 20_000  # more than a block
    table = pa.table({"label": list(range(count)), "other": [0.0] * count, "text": [f"t{i}" for i in range(count)]})
    pq.write_table(table, tmp_path / "t.parquet")
    rows = list(read_rows(tmp_path / "t.parquet", COLUMNS))
    assert len(rows) == count
    assert rows[-1] == Row("row 20000", ("t19999", 19999))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "text,klass\na,1\n", r"--label-column label: .*t\.csv has no column label; there are text, klass"),
        ("t.csv", "", r"--text-column text: .* has no column text; there are none"),
        ("t.csv", "text,label,text\na,1,b\n", r"--text-column text: .* has 2 columns text"),
        ("t.jsonl", '{"text": "a"}\n', r"--label-column label: .* has no column label; there are text"),
        ("t.csv", "text,label\n".encode("utf-16"), r"t\.csv, line 1: no UTF-8"),
        ("t.csv", '"text,label\na,1\n', r"t\.csv, line 1: unexpected end of data"),
        ("t.parquet", "text,label\n", r"t\.parquet is no readable Parquet file \(after row 0\)"),
        ("t.xlsx", "", r"t\.xlsx is no table by its name: \.csv, \.tsv"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rows_of(tmp_path / name, content)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.csv cannot be read: No such file"):
        list(read_rows(tmp_path / "none.csv", COLUMNS))
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(BadInput, match=r"folder\.parquet cannot be read"):
        list(read_rows(tmp_path / "folder.parquet", COLUMNS))
    assert is_table("A.TSV")
    assert not is_table("a.txt")


@pytest.mark.parametrize("value", ["", None, "-1", "nan", "inf", "x", [1]])
def test_what_is_no_weight(value: object) -> None:
    assert as_weight("0.5", "here") == 0.5
    with pytest.raises(BadInput, match=r"here: .* is no weight: a finite number, 0 or more"):
        as_weight(value, "here")
