"""What fields of dataclasses say of themselves, and values out of texts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction

import pytest

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import borrowed, field_values, filled, least_problems, setting, settings_of
from flexgen_h2o.basics.values import read_choice, read_ratio, read_real, read_switch, read_whole


@dataclass(frozen=True)
class Cake:
    """Something to fill."""

    layers: int = setting(3, "whole", "that lie on one another", shown=3, least=1, most=9)
    is_round: bool = setting(True, "switch", "or with corners")
    guests: int | None = setting(None, "whole", "who want some", flag="--eaters", least=1)
    baker: str = "nobody"


@dataclass(frozen=True)
class Tart:
    """Something like it."""

    layers: int = borrowed(Cake, "layers", 1, most=2)
    eaters: int | None = borrowed(Cake, "guests")
    fruit: str = setting("plum", "text", "on top")


def test_a_field_that_says_nothing_is_not_for_people() -> None:
    assert list(settings_of(Cake)) == ["layers", "is_round", "guests"]
    assert Cake() == Cake(3, True, None, "nobody")


def test_a_setting_knows_its_flag_and_tells_its_default() -> None:
    known = settings_of(Cake)
    assert [one.flag for one in known.values()] == ["--layers", "--is-round", "--eaters"]
    assert known["layers"].help == "that lie on one another (default: 3)"
    assert known["is_round"].help == "or with corners (default: true)"
    assert known["guests"].help == "who want some"


def test_what_is_borrowed_is_the_same_but_for_what_is_said() -> None:
    assert Tart() == Tart(1, None, "plum")
    lent, own = settings_of(Cake)["layers"], settings_of(Tart)["layers"]
    assert (own.text, own.least, own.most) == (lent.text, lent.least, 2)
    assert settings_of(Tart)["eaters"] == settings_of(Cake)["guests"]
    with pytest.raises(ValueError, match="not enough values"):
        borrowed(Cake, "candles")


def test_numbers_that_are_too_small_are_named_with_their_flags() -> None:
    assert least_problems(Cake(0, guests=-1)) == [
        "--layers is 0; it must be at least 1",
        "--eaters is -1; it must be at least 1",
    ]
    assert least_problems(Cake()) == []


def test_keywords_go_to_the_dataclasses_that_have_them() -> None:
    assert filled("bake", {"baker": "Ann", "fruit": "pear"}, (Cake, Tart)) == [Cake(baker="Ann"), Tart(fruit="pear")]


def test_keywords_that_nothing_has_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        filled("bake", {"fruits": "pear", "ovn": 1, "layers": 2}, (Cake, Tart), also=("oven",))
    first, second = caught.value.problems
    assert "bake has no setting 'fruits'" in first and "'fruit'" in first
    assert "'ovn'" in second and "'oven'" in second


def test_values_of_fields_are_not_copied() -> None:
    cake = Cake()
    assert field_values(cake) == {field.name: getattr(cake, field.name) for field in fields(Cake)}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("whole", "7", 7),
        ("real", "0.5", 0.5),
        ("ratio", "0.35", Fraction(7, 20)),
        ("switch", "FALSE", False),
        ("choice", "b", "b"),
        ("text", " as it is ", " as it is "),
    ],
)
def test_a_setting_reads_values_of_its_kind(kind: str, text: str, expected: object) -> None:
    @dataclass
    class One:
        field: object = setting(None, kind, "", known=("a", "b"))

    value = settings_of(One)["field"].read("--field", text)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: read_whole("--n", "x", 1), ["--n is 'x'", "whole number of at least 1"]),
        (lambda: read_whole("--n", "0", 1), ["--n is 0", "at least 1"]),
        (lambda: read_whole("--n", "9", 1, 8), ["--n is 9", "at least 1 and at most 8"]),
        (lambda: read_whole("--n", "4", 1, 9, is_odd=True), ["--n is 4", "an odd number of at least 1"]),
        (lambda: read_real("--n", "inf"), ["--n is 'inf'", "a number of at least 0"]),
        (lambda: read_real("--n", "2", 0, 1), ["--n is '2'", "at least 0 and at most 1"]),
        (lambda: read_ratio("--n", "1/0"), ["--n is '1/0'", "between 0 and 1"]),
        (lambda: read_switch("--n", "yes"), ["--n is 'yes'", "true or false"]),
        (lambda: read_choice("--n", "c", ("a", "b")), ["--n is 'c'", "one of a, b"]),
    ],
)
def test_a_text_that_is_no_value_is_one_sentence(read: object, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read()  # type: ignore[operator]
    (problem,) = caught.value.problems
    assert all(word in problem for word in words)
