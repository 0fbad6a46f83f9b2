"""Where problems stand in the rows of public sets. The rows are made here, in the forms those sets have."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl_sat.data import schemas
from jaxrl_sat.data.records import Unusable
from jaxrl_sat.data.schemas import Example

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def read(fields: dict[str, Any], schema: str | None = None) -> Example:
    return schemas.recognise(fields, schema).read(fields)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PUBLIC = {
    "dapo": {
        "data_source": "math_dapo",
        "prompt": user(f"{DAPO_BEFORE}What is $1+1$?{DAPO_AFTER}"),
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": "7"},
    },
    "dolci": {"prompt": "user: What is $1+1$?", "ground_truth": ["2"], "dataset": ["math"], "id": "7"},
    "dolci, messages": {"messages": user("What is $1+1$?"), "ground_truth": "2", "id": 7},
    "gsm8k": {"question": "What is $1+1$?", "answer": "It is 1+1=<<1+1=2>>2.\n#### 2", "id": "7"},
    "math": {
        "problem": "What is $1+1$?",
        "solution": r"One and one: $\boxed{2}$.",
        "level": "Level 1",
        "unique_id": "7",
    },
    "math, answer": {"problem": "What is $1+1$?", "answer": " 2", "solution": r"\boxed{3}", "unique_id": "7"},
    "aime, nemo": {"id": "7", "problem": "What is $1+1$?", "expected_answer": "2", "reference_solution": r"\boxed{3}"},
    "aime": {"id": "7", "problem": "What is $1+1$?", "answer": 2},
    "plain": {"prompt": "What is $1+1$?", "answer": 2.0, "id": "7"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_forms_of_public_sets(name: str) -> None:
    wanted = Example("What is $1+1$?", "2", "7")
    assert read(PUBLIC[name]) == wanted
    assert read(PUBLIC[name], name.partition(",")[0]) == wanted


def test_the_same_columns_under_a_name_of_choice() -> None:
    fields = {"problem": "p", "answer": "5", "id": "i", "unique_id": "u"}
    assert read(fields, "dapo") == read(fields, "aime") == Example("p", "5", "i")
    assert read(fields) == Example("p", "5", "u")
    assert read({"problem": "p", "answer": "5"}) == Example("p", "5", "")
    assert read({"problem": "p", "answer": "5", "id": float("nan")}) == Example("p", "5", "")


def test_columns_that_no_schema_has_are_named() -> None:
    with pytest.raises(schemas.Unrecognised, match="has the columns text, label; allowed: prompt and reward_model"):
        read({"text": "", "label": 0})
    with pytest.raises(schemas.Unrecognised, match="has the columns prompt, answer; allowed: question and answer$"):
        read({"prompt": "", "answer": ""}, "gsm8k")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "p", "answer": None}, "no answer"),
        ({"prompt": "p", "answer": "  "}, "no answer"),
        ({"prompt": "p", "answer": []}, "no answer"),
        ({"prompt": "p", "answer": float("nan")}, "no answer"),
        ({"prompt": "p", "answer": float("inf")}, "neither text nor a number"),
        ({"question": "p", "answer": "It is 5."}, "no answer"),
        ({"problem": "p", "solution": "It is 5."}, "no answer"),
        ({"prompt": None, "answer": "5"}, "no prompt"),
        ({"prompt": DAPO_BEFORE + DAPO_AFTER, "answer": "5"}, "no prompt"),
        ({"prompt": 5, "answer": "5"}, "prompt that is not text"),
        ({"prompt": [*user("p"), *user("q")], "answer": "5"}, "prompt that is not one message"),
        ({"prompt": [{"role": "system", "content": "p"}], "answer": "5"}, "prompt that is not one message"),
        ({"prompt": "p", "answer": ["5", "6"]}, "several answers"),
        ({"prompt": "p", "answer": True}, "neither text nor a number"),
        ({"prompt": "p", "answer": {"value": 5}}, "neither text nor a number"),
        ({"prompt": "p", "answer": "5" * 20_001}, "answer over 20000 characters"),
        ({"prompt": "\ud800", "answer": "5"}, "not Unicode"),
        ({"prompt": "p", "reward_model": "5", "extra_info": None}, "no answer"),
    ],
)
def test_rows_without_a_usable_problem(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Unusable, match=said):
        read(fields)


def test_copies_of_a_problem() -> None:
    def same(one: str, other: str) -> bool:
        return schemas.identity(one) == schemas.identity(other)

    assert same("Find $x$ if \\(x + 1 = 2\\).", "find x  if $x+1=2$ ?")
    assert same(r"Compute $\dfrac{1}{2}\,\left(a\right)$", r"Compute \[ \frac{1}{2}(a) \]")
    assert same("\uff12 apples", "2 apples")
    assert not same("Compute 2.5", "Compute 25")
    assert not same("Compute 1-2", "Compute 1+2")
    assert not same("f(1,2)", "f(12)")
    assert not same(r"\frac{1}{2}", r"\frac{2}{1}")
    assert not same("Compute 5!", "Compute 5")
    assert not same("Compute 2\u00b3", "Compute 23") and same("Compute x\u00b3", "Compute $x^3$")
    assert not same("10\u2082 in base ten", "102 in base ten") and same("a\u2081", "a_1")
    assert not same("Write 1 1/2 as a decimal", "Write 11/2 as a decimal")
