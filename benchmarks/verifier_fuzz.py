"""Coverage-guided fuzzing of the verifier: python -m benchmarks.verifier_fuzz [-max_total_time=600]

Needs atheris (and sympy, jaxtyping), in an environment of its own. A text that raises, takes over two seconds of
processor time or holds on to memory stops it, with the text in a file; the arguments are libFuzzer's. A cap stands for
the worker's: 512 MiB for the process.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

atheris: Any = importlib.import_module("atheris")
with atheris.instrument_imports(include=["jaxrl_sat"]):
    from jaxrl_sat.rewards.equivalence import equivalent, readable
    from jaxrl_sat.rewards.extract import final_answer

SECONDS = 2.0
_PIECES = (
    r"\frac \sqrt \pi \infty \pm \cup \sin \log \{ \} \text{ \begin{pmatrix} \end{pmatrix} \\ \le \in \boxed{ "
    r"\overline{ \mathbb{R} \setminus \binom ^{ _{ #### </think> <answer> </answer> ** or and answer is "
    r"\begin{vmatrix} \end{vmatrix} \det \operatorname{cis} \begin{cases} \end{cases} \ne \lor ^T "
    r"]0,1[ |x| maybe million 1,000 0.3 x y e i n cm ("
).split()


def test_one(data: bytes) -> None:
    """One response and one answer made of pieces and raw text."""
    provider = atheris.FuzzedDataProvider(data)
    texts = []
    for _ in range(2):
        parts = []
        while provider.remaining_bytes() and provider.ConsumeIntInRange(0, 24):
            piece = provider.ConsumeIntInRange(0, 2 * len(_PIECES))
            raw = provider.ConsumeUnicode(provider.ConsumeIntInRange(0, 4))
            parts.append(_PIECES[piece] if piece < len(_PIECES) else raw)
        texts.append("".join(parts))
    begin = time.process_time()
    found = final_answer(texts[0])
    for left, right in ((found or "", texts[1]), (texts[0], texts[1]), (texts[1], "2x+1")):
        equivalent(left, right)
    readable(texts[1])
    if texts[0].strip(" .,;:") and equivalent(texts[0], texts[0]) is not True and readable(texts[0]):
        raise AssertionError(f"not itself: {texts[0]!r}")
    if time.process_time() - begin > SECONDS:
        raise AssertionError(f"slow: {texts!r}")


def main() -> None:
    """Fuzz until told to stop."""
    atheris.Setup([*sys.argv, "-rss_limit_mb=512"], test_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
