"""JSON that anybody may have written is read within limits, and refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core import files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 200000, "more than 64 deep"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "more than 64 deep"),
        (b"[" * 66 + b"]" * 66, "more than 64 deep"),
        (b"9" * 6000, "a number of 6000 digits"),
        (b"-1e400", "-1e400 is not a number that can be kept"),
        (b"0." + b"1" * 5000, "is not a number that can be kept"),
        (b"NaN", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is given twice"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"", "Expecting value"),
        (b'{"a": 1}}', "Extra data"),
    ],
)
def test_what_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        files.parse_json(text)


def test_what_is_read() -> None:
    assert files.parse_json(b"[" * 60 + b"]" * 60)
    assert files.parse_json('{"a": [1, -2.5e3, true, null, "\\u00e4"]}') == {"a": [1, -2500.0, True, None, "ä"]}


def test_a_long_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    path.write_text("[" + "1," * 1000 + "1]")
    assert len(files.read_json(path)) == 1001
    with pytest.raises(ValueError, match="more than 100 bytes"):
        files.read_json(path, limit=100)
