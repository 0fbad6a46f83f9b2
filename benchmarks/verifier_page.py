"""docs/verifier.md: what the verifier takes for an answer, and the tables that `benchmarks.verifier` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COMMAND = """    benchmarks/peers.sh verifiers /tmp/verifiers
    python -m benchmarks.verifier --data=FOLDER --peer-python=/tmp/verifiers/bin/python --page=docs/verifier.md
"""

OWN_CASES = """
Of the same kinds and some more, tests/rewards/cases_more.jsonl holds cases of our own, judged by hand before the
verifier was asked. Of the first 1,623 it disagreed with 195: most were forms that it could not read and now does; some
that may be judged either way are left out, as are very long ones. Of 127 written after that it disagreed with 8.
"""

INTRODUCTION = r"""# The verifier

`jaxrl_sat.rewards.verify(response, answer)` says whether the final answer of a response is the right one. It never
evaluates text: a tokenizer and a parser of this project read LaTeX and plain mathematics, and refuse what is not on
their lists. Reading and comparing happen in processes of their own (2 s of processor time, 5 s by the clock, 512 MiB),
started when first needed; what text alone decides (equal text, whole numbers, decimals, plain fractions) needs none.

## Where the final answer is looked for

What follows the last `</think>` (a thought that is not closed has no answer), in its last 20,000 characters; the first
convention that is used at all, even if there is no answer in it:

1. the last `\boxed{...}`. Not closed: wrong. Several side by side that differ: wrong. An empty box is only a mention.
2. the line behind the last `####`;
3. the sentence behind the last `Answer:`, `answer is`, `option is` or `choice is`, without a reason at its end
   (`because`, `since`, a bracket of words): its one formula, its one number, or all of it; with a hedge in it (`or`,
   `not`, `maybe`, `between`, ...) or a call (`eval(...)`) it is no number;
4. the last `<answer>...</answer>`;
5. the last **bold** number or equation;
6. the last number, or the last `$formula$` behind it, with those that it is listed with (`$x = 1$ and $x = 2$`).

## What is taken for equal

* Numbers exactly, whatever their length. A decimal is right for a fraction without finite decimals if it has at least
  six of them and is off by less than one in the last; no decimal is right for pi or a root.
* `28%` is 28 as well as 0.28 where the other side has no sign of its own; 0.5 is never 50. So with
  3 million or 2 dozen.
* `2\frac{1}{2}` is two and a half; an improper fraction behind a whole number is refused. `1010_2` is ten, `A5_{11}` is
  115. `0.36\overline{6}`, `0.3\dot{6}` and `0.3666...` are 11/30.
* Units may be left out; known ones are converted (1 m is 100 cm), and wrong where they differ (12 m for 12 cm; am for
  pm; `\$5` for 5 cents). No unit is put in: 1 hour is not 60.
* Lists and sets have no order and must be complete; points, vectors and matrices have one. Of a set it does not matter
  how often something is in it, of a list it does. `(1, 2)` is a point or an interval, whichever the other side is; a
  column is also a point. `\pm` stands for two answers.
* `x = 5` is 5, `f(x) = x^2` is x^2; equations are equal up to a factor, inequalities up to a positive one, and those of
  one variable with numbers are intervals, joined by `or` and met by `and`. A response may name what it found (`m + n =
  27` for 27, with no number on the left); a reference answer that is an equation is not its right side, unless the left
  is one name. What stands behind `\approx` is left out where it is near.
* `3 \pmod 7` is 3, and `10 \pmod 7`. Ratios and times are as they are written: 1:2 is not 2:4.
* Formulas: by their values at fixed points to 150 digits, over the reals where both have a value, so that nothing is
  ever simplified. The square root of x^2 is |x| and not x.
* Sums, integrals, limits and numbers beyond the caps (400 digits, 20,000 bits, 1000!, 40 levels, 600 tokens, 2,000
  characters) are right only as the same text.
"""


def page(
    rows: Sequence[Any], cases: Sequence[Mapping[str, Any]], rates: Mapping[str, Any], timed: Mapping[str, Any]
) -> str:
    """The page in Markdown."""
    parts = [INTRODUCTION, "\n## Beside other verifiers\n", _table(rows, cases), "\nMade anew, with all below, by\n"]
    parts += [COMMAND, _disagreements(rows[0], cases), _rates(rates), _speed(timed)]
    return "\n".join(parts)


def _table(rows: Sequence[Any], cases: Sequence[Mapping[str, Any]]) -> str:
    right = sum(case["expected"] for case in cases)
    lines = [
        f"{len(cases)} cases (tests/rewards/verifier_cases.jsonl), {right} right and {len(cases) - right} wrong; some",
        "are reports against verifiers in public use. An execution is a file that the text of a response made. Others",
        "have their defaults, 10 s a case in a process of its own; a time-out is a case of over 5 s, and what raises",
        "or dies says wrong.\n",
        "| verifier | wrong taken for right | right taken for wrong | time-outs | executions |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.verifier} | {row.false_positives} | {row.false_negatives} | {row.timed_out} | {row.executed} |"
        for row in rows
    ]
    return "\n".join(lines)


def _disagreements(row: Any, cases: Sequence[Mapping[str, Any]]) -> str:
    if not row.failed:
        return "Ours says what is expected of every case.\n" + OWN_CASES
    named = [f"* case {i}: {cases[i]['kind']}, expected {cases[i]['expected']}" for i in row.failed]
    return "Where ours disagrees:\n\n" + "\n".join(named) + "\n" + OWN_CASES


def _rates(rates: Mapping[str, Any]) -> str:
    if not rates:
        return ""
    lines = [
        "## On the reference answers of GSM8K and MATH\n",
        "Right: each answer against itself written in other ways that fit its type (boxed, spaced, dfrac, decimal,",
        "unit, thousands, sign, list reversed, in a sentence, ...). Wrong: the next problem's answer, if it differs.\n",
        "| | cases | as expected | time-outs |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {one['cases']:,} | {one['rate']:.4%} | {one['timed_out']} |" for name, one in rates.items()]
    exceptions = [(name, *missed) for name, one in rates.items() for missed in one["exceptions"]]
    lines += ["\nExceptions:\n"] if exceptions else ["\nNo exceptions."]
    lines += [f"* {name}, {way}: `{response}` for `{answer}`" for name, way, response, answer in exceptions]
    return "\n".join(lines) + "\n"


def _speed(timed: Mapping[str, Any]) -> str:
    return (
        f"## Speed\n\n{timed['responses']:,} responses in {timed['seconds']} s with {timed['workers']} workers, their "
        f"start included\n({timed['what']}); the same again, from\nmemory: {timed['seconds_again_from_memory']} s. "
        f"On {timed['cores']} cores, at a load of {timed['load']} from other work.\n"
    )
