"""The demo task: the problem set, the parser, and a judge that cannot be tricked or crashed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.countdown import MAX_EXPRESSION_CHARS, Parsed, judge, parse, problems, solutions


def test_there_are_125_pairs_of_which_25_are_held_out_and_6_four_number_problems() -> None:
    every = problems()

    assert [sum(p.task == task for p in every) for task in ("pairs", "four")] == [125, 6]
    assert sum(p.held_out for p in every) == 25
    assert all(p.task == "pairs" for p in every if p.held_out)
    assert "1,2,3,4=24:" in {p.prompt for p in every}
    assert len({p.prompt_id for p in every}) == 131


def test_every_problem_has_a_right_answer() -> None:
    for problem in problems():
        found = solutions(problem)
        assert len(found) >= 1
        assert all(judge(text, problem.numbers, problem.target) for text in found)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", Fraction(7)),
        ("1+2*3", Fraction(7)),
        ("(1+2)*3", Fraction(9)),
        ("8-3-2", Fraction(3)),
        ("1/3*3", Fraction(1)),
        ("8/(3-8/3)", Fraction(24)),
        ("((4))", Fraction(4)),
    ],
)
def test_values_are_exact_and_precedence_is_usual(text: str, value: Fraction) -> None:
    parsed = parse(text)

    assert parsed is not None
    assert value == parsed.value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "1+",
        "-1",
        "1 + 2",
        "(1",
        "1)",
        "()",
        "1**2",
        "1//2",
        "01",
        "1/0",
        "2/(1-1)",
        "1.5",
        "x",
        "\u0661+1",
        "1=1",
    ],
)
def test_anything_else_is_not_an_expression(text: str) -> None:
    assert parse(text) is None


def test_each_number_must_be_used_exactly_once() -> None:
    assert judge("3*4", [4, 3], 12)
    assert not judge("3*4*1", [3, 4], 12)
    assert not judge("12", [3, 4], 12)
    assert not judge("3+3*3", [3, 4, 3], 12)


@pytest.mark.parametrize(
    "text", ["(" * 500, "(" * 99 + "1" + ")" * 99, "9" * 10_000, "1+" * (MAX_EXPRESSION_CHARS // 2) + "1"]
)
def test_deep_or_long_texts_are_wrong_and_harmless(text: str) -> None:
    assert parse(text) is None


@given(st.text(alphabet="0123456789+-*/()", max_size=40))
def test_the_parser_never_raises_and_agrees_with_exact_arithmetic(text: str) -> None:
    parsed = parse(text)

    if parsed is not None:
        rebuilt = parse(f"({text})")
        assert rebuilt == Parsed(value=parsed.value, numbers=parsed.numbers)


@given(st.text(max_size=60))
def test_the_judge_never_raises(text: str) -> None:
    assert judge(text, [1, 2], 3) in (True, False)
