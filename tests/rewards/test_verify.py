"""Final answers, found and compared."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_sat.rewards import score, verify

RIGHT = [
    ("46", "46"),
    ("-333", "-333"),
    ("12+34=46", "46"),
    ("=-12", "-12"),
    ("The answer is 46, which was to be shown.", "46"),
    ("Answer: 46", "46"),
    ("**Answer:** $46$", "46"),
    ("Answer:\n46", "46"),
    ("Answer: 5. No, wait.\nAnswer: 46 apples", "46"),
    ("She has 12.\n#### 46", "46"),
    ("#### 1,234", "1234"),
    ("\\boxed{46}", "46"),
    ("first \\boxed{1}, then \\boxed{46}. Answer: 7", "46"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{ {a} \\{b }", "{a}\\{b"),
    ("so 12, and then 46.", "46"),
    ("007", "7"),
    ("+7", "7"),
    ("-0", "0"),
    ("\u221212", "-12"),
    ("1,234,567", "1234567"),
    ("9" * 6000, "9" * 6000),
]
WRONG = [
    ("12346", "12345"),
    ("12345", "12346"),
    ("5000", "50"),
    ("50", "5000"),
    ("500", "50"),
    ("0.5", "5"),
    ("12.5", "12"),
    ("3/4", "4"),
    ("-7", "7"),
    ("46-2", "2"),
    ("46-2", "46"),
    ("46 47", "46"),
    ("x46", "46"),
    ("2^10", "10"),
    ("1,23", "23"),
    ("", "46"),
    ("", ""),
    ("46", ""),
    ("<eos>", "46"),
    ("no number", "46"),
    ("\\boxed{}", "0"),
    ("\\boxed{46", "46"),
    ("\\boxed{4} 46", "46"),
    ("\u0664\u0666", "46"),
    ("\uff14\uff16", "46"),
    ("9" * 6000, "9" * 5999),
    ("__import__('os').system('true')+0", "0"),
    ("2*23", "46"),
]


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_right(response, answer):
    assert verify(response, answer)


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_wrong(response, answer):
    assert not verify(response, answer)


HUGE = 2_000_000


@pytest.mark.parametrize(
    "response",
    [
        "1" * HUGE,
        "1," * HUGE,
        "-" * HUGE,
        "\\boxed{" * (HUGE // 7),
        "{" * HUGE,
        "\\" * HUGE,
        "answer is " * (HUGE // 10),
        "#" * HUGE,
        " " * HUGE,
        "0" * HUGE,
        "1+" * HUGE,
        "\\boxed{" + "{" * HUGE + "}" * HUGE + "}",
        "\ud800" * 1000,
        "\x00" * 1000,
        "\U0001f600" * 100_000,
    ],
    ids=lambda text: repr(text[:8]),
)
def test_huge_and_strange_responses_are_wrong_and_done(response):
    """Quadratic work on two million characters would not come back."""
    assert not verify(response, "46")
    assert not verify("46", response)


def test_the_answer_stands_at_the_end_of_a_long_response():
    assert verify("let me think 3 4 5 " * 100_000 + "\\boxed{46}", "46")
    assert verify("let me think 3 4 5 " * 100_000 + "46", "46")


def test_score_is_one_float_a_response():
    found = score(["46", "47", ""], ["46", "46", "46"])
    assert found.dtype == np.float32
    assert found.tolist() == [1.0, 0.0, 0.0]
    assert score([], []).shape == (0,)
    with pytest.raises(ValueError):
        score(["46"], [])
