"""Test that printed text cannot steer a terminal, how things are counted, and that a table's columns are aligned."""

import pytest

from outrider.core.text import clean, counted, masked, table


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\r\tc", r"a\x0ab\x0d\x09c"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("a\u2028b\u200b", r"a\u2028b\u200b"),
        ("\U000e0041", r"\U000e0041"),
        ("Zoë 東京", "Zoë 東京"),
    ],
)
def test_what_steers_a_terminal_is_shown_as_its_code(said, shown):
    assert clean(said) == shown


def test_columns_are_as_wide_as_the_widest_cell_and_lines_have_no_end_of_blanks():
    assert table(("A", "LONG"), [("xyz", "1"), ("", "2")]) == "A    LONG\nxyz  1\n     2"
    assert table(("A", "B"), [("東京", "1"), ("Zoë", "2")]).splitlines()[1:] == ["東京  1", "Zoë   2"]


def test_one_thing_is_singular_and_any_other_number_is_plural():
    assert [counted(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("got 'user:pa/s@s@h:6379', more", "got '***@h:6379', more"),
        ("redis is redis://h:99999, %40 for @, %2F", "redis is redis://h:99999, %40 for @, %2F"),
        ("h:6379?password=hush", "h:6379?password=***"),
        ("at 10:20 org/name@main:file.gguf http://h:80/v1", "at 10:20 org/name@main:file.gguf http://h:80/v1"),
    ],
)
def test_credentials_are_masked_with_a_scheme_and_without(said, shown):
    assert masked(said) == shown


@pytest.mark.parametrize("text", ['{"to":"bob@x.org"}', "localhost:7700,user@x", "@" + "a:" * 20_000])
def test_what_is_no_credential_stays(text: str) -> None:
    assert masked(text) == text
