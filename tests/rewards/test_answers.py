"""Answers read as mathematics and compared, in this process: each kind of rule, and the limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sat.rewards import lexer
from jaxrl_sat.rewards.equivalence import equivalent, readable
from jaxrl_sat.rewards.extract import final_answer
from jaxrl_sat.rewards.normalise import tidy
from jaxrl_sat.rewards.read import read
from jaxrl_sat.rewards.values import Value

CASES = [json.loads(line) for line in (Path(__file__).parent / "verifier_cases.jsonl").read_text().splitlines()]


def test_all_cases_are_as_expected() -> None:
    failed = []
    for i, case in enumerate(CASES):
        found = final_answer(case["response"])
        if (found is not None and equivalent(found, case["answer"])) != case["expected"]:
            failed.append((i, case["kind"], found))
    assert failed == []


VALUES = [
    (r"\frac{3}{4}", sympy.Rational(3, 4)),
    (r"\frac34", sympy.Rational(3, 4)),
    (r"\frac3{14}", sympy.Rational(3, 14)),
    (r"3/4", sympy.Rational(3, 4)),
    (r"2\frac{1}{2}", sympy.Rational(5, 2)),
    ("2 1/2", sympy.Rational(5, 2)),
    (r"-1\frac12", sympy.Rational(-3, 2)),
    (r"2\cdot\frac12", sympy.Integer(1)),
    (r"0.1\overline{6}", sympy.Rational(1, 6)),
    ("0.(3)", sympy.Rational(1, 3)),
    ("1.5e3", sympy.Integer(1500)),
    (r"1.5 \times 10^{-3}", sympy.Rational(3, 2000)),
    ("2^10", sympy.Integer(1024)),
    ("2^3^2", sympy.Integer(512)),
    ("-2^2", sympy.Integer(-4)),
    ("2**-1", sympy.Rational(1, 2)),
    ("1{,}234{,}567", sympy.Integer(1234567)),
    (r"12\,345.5", sympy.Rational(24691, 2)),
    ("3!!", sympy.Integer(720)),
    (r"\binom{5}{2}", sympy.Integer(10)),
    ("1010_2", sympy.Integer(10)),
    ("777_{8}", sympy.Integer(511)),
    ("\u00bd", sympy.Rational(1, 2)),
    ("8/2/2", sympy.Integer(2)),
    ("1-2-3", sympy.Integer(-4)),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_value(text: str, value: sympy.Expr) -> None:
    found = read(tidy(text))
    assert isinstance(found, Value)
    assert sympy.simplify(found.expr - value) == 0


SAME = [
    ("(x-1)(x+1)", "x^2-1"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sqrt{12}", r"2\sqrt3"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\arcsin x", r"\sin^{-1} x"),
    (r"\tan^{-1} 1", r"\frac{\pi}{4}"),
    (r"\sin 30^\circ", "1/2"),
    (r"\ln e^2", "2"),
    (r"\log_{10} 1000", "3"),
    (r"e^{i\pi}", "-1"),
    ("(1+i)(1-i)", "2"),
    (r"\lfloor 3.7 \rfloor", "3"),
    ("(n+1)!", "(n+1)n!"),
    ("(-1)^{2n}", "1"),
    ("2^{n+1}", r"2\cdot2^n"),
    ("x_1+x_2", "x_2+x_1"),
    ("ab", r"a \cdot b"),
    ("1/2x", r"\frac{x}{2}"),
    (r"50\%", "0.5"),
    ("0.333333333", r"\frac13"),
    (r"\pm 3", "3,-3"),
    (r"x=\pm\sqrt{2}", r"\sqrt2,-\sqrt2"),
    ("y=x+1", "2y-2x=2"),
    ("f(x)=x^2", "x^2"),
    ("2+3=5", "5"),
    ("x=1,y=2", "(1,2)"),
    ("2x+y<6", "y<6-2x"),
    ("2>x>1", "(1,2)"),
    (r"x<-1 \text{ or } x>1", r"(-\infty,-1)\cup(1,\infty)"),
    (r"\mathbb{R}\setminus\{2\}", r"x\neq 2"),
    (r"\{x \mid x>3\}", r"(3,\infty)"),
    (r"x\in[1,2]", "[1,2]"),
    (r"\{1\}\cup\{2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}\frac12 & 0.5\\ 1&2\end{pmatrix}", r"\begin{bmatrix} 1/2 & 1/2 \\[2pt] 1 & 2\end{bmatrix}"),
    (r"\langle 1,2\rangle", "(1, 2)"),
    ("1 : 2", "1:2"),
    ("7:30 p.m.", r"7:30 \text{ pm}"),
    (r"12\text{ inches}", r"12\text{ in}"),
    ("5 dollars", r"\$5"),
    (r"12 \text{ square meters}", r"12\text{ m}^2"),
    ("tuesday", r"\text{Tuesday}"),
    ("(C)", r"\text{C}"),
    (r"\textbf{(B)}\ 12", "12"),
    (r"\text{A, B}", "B, A"),
]
DIFFERENT = [
    (r"\sqrt{x^2}", "x"),
    ("|x|", "x"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("y=x+1", "y=x+2"),
    ("x=5", "y=5=6"),
    ("2+2=5", "5"),
    ("2x+y>6", "y<6-2x"),
    ("x=5=6", "6"),
    ("y=2,x=1", "(1,2)"),
    (r"0.28\%", r"28\%"),
    ("0.333", r"\frac13"),
    ("12345.000001", "12345"),
    ("3.14159265358979", r"\pi"),
    ("101_2", "101_3"),
    (r"12\text{ m}", r"12\text{ cm}"),
    (r"12\text{ cm}^2", r"12\text{ cm}^3"),
    ("7:30 a.m.", "7:30 p.m."),
    ("1:2", "2:4"),
    ("ABCD", r"\text{CBAD}"),
    ("(A) or (C)", "C"),
    ("3,3", "3"),
    ("1, 234", "1234"),
    (r"2\frac{3}{2}", "3"),
    (r"-\infty", r"\infty"),
    ("0/0", "0"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"x<3 \text{ or } y>5", r"(-\infty,3)\cup(5,\infty)"),
    (r"\sum_{k=1}^{3} k", "6"),
    ("lambda: 0", "0"),
    ("x.__class__", "x"),
    ("\u0665", "5"),
    ("5\x00", "5"),
]


@pytest.mark.parametrize(("found", "answer"), SAME)
def test_same(found: str, answer: str) -> None:
    assert equivalent(found, answer)
    assert equivalent(answer, found)


@pytest.mark.parametrize(("found", "answer"), DIFFERENT)
def test_different(found: str, answer: str) -> None:
    assert not equivalent(found, answer)
    assert not equivalent(answer, found)


BOMBS = [
    "9^{9^{9^{9}}}",
    "1000!!!",
    "x^{99999999999}",
    "e^{e^{e^{e^{9}}}}",
    "2^{2^{2^{2^{2}}}}",
    "9999999999^{1999}",
    r"\binom{10^{9}}{5}",
    "((" * 40 + "1" + "))" * 40,
    "{" * 900 + "1" + "}" * 900,
    r"\frac1" * 300 + "1",
    r"\sqrt" * 300 + "2",
    "2^" * 300 + "2",
    "(x+1)" + "^{99}" * 30,
    "1" * (lexer.DIGITS + 1) + "x",
    "+".join(f"x_{{{i}}}" for i in range(400)),
    r"\sin" * 300 + "1",
    "1e999x",
    "!" * 900,
    "|" * 900,
]


@pytest.mark.parametrize("text", BOMBS, ids=lambda text: text[:12])
def test_what_could_grow_is_refused_or_bounded(text: str) -> None:
    """Any of these, worked out, would not come back."""
    assert not equivalent(text, "5y")
    assert not equivalent("5y", text)
    assert equivalent(text, text)


def test_readable() -> None:
    assert readable(r"\frac{1}{2}") and readable(r"\text{Tuesday}") and readable(r"(-\infty, 3]")
    assert not readable(r"\sum_{k} k") and not readable("__import__('os')") and not readable("")


PIECES = st.sampled_from(
    [
        *r"0123456789xyine+-*/^_!%|()[]{},;:=<>&. ",
        r"\frac",
        r"\sqrt",
        r"\pi",
        r"\infty",
        r"\pm",
        r"\cup",
        r"\sin",
        r"\log",
    ]
    + [
        r"\{",
        r"\}",
        r"\text{ cm}",
        r"\text{ or }",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        "\\\\",
        r"\le",
        r"\in",
        "1,000",
    ]
    + [
        r"\boxed{",
        "$",
        "####",
        "answer is ",
        "<answer>",
        "</answer>",
        "</think>",
        "**",
        "\n",
        "\x00",
        "\u0665",
        "_2",
    ]
    + [
        r"\det",
        r"\begin{vmatrix}",
        r"\end{vmatrix}",
        r"\operatorname{cis}",
        r"\ne",
        "^T",
        "between ",
        "maybe ",
        " million",
        r"\begin{cases}",
        r"\end{cases}",
        r"\lor",
        "|x|",
        "!",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=30).map("".join), st.lists(PIECES, max_size=12).map("".join))
def test_no_text_raises(response: str, answer: str) -> None:
    found = final_answer(response)
    assert found is None or isinstance(found, str)
    assert isinstance(equivalent(response, answer), bool)
    assert isinstance(equivalent(found or "", answer), bool)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(1, 10**6), st.integers(-5, 5))
def test_fractions_are_compared_exactly(above: int, below: int, off: int) -> None:
    same = sympy.Rational(above, below) == sympy.Rational(above + off, below)
    assert equivalent(f"\\frac{{{above}}}{{{below}}}", f"{2 * (above + off)}/{2 * below}") == same
    assert equivalent(f"x+\\frac{{{above}}}{{{below}}}", f"\\frac{{{below}x+{above + off}}}{{{below}}}") == same
