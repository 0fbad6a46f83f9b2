"""How often a model is right: avg@k and pass@k on sets of problems, with 95% intervals; and two models compared.

    python -m jaxrl_sat.evaluate --model=FOLDER --data=SET[,SET] [--samples=K] [--out=FOLDER]
    python -m jaxrl_sat.evaluate --compare A B [--out=FOLDER]

A SET is the folder of a prepared set, `arithmetic`, or a file of problems as prepare_data reads it. With --out no
problem that is finished is asked again: stopped, the same command goes on. Two are compared problem by problem, with a
paired test. Exit status 0: done. 2: the input cannot be used; one line on stderr says what. 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's own). Returns the exit status."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ log: errors only
    from jaxrl_sat import cli

    return cli.exit_status(_run, argv)


def _run(argv: Sequence[str]) -> None:
    from jaxrl_sat.evaluation import compare, options, run

    asked = options.parse(argv, __doc__ or "")
    if isinstance(asked, options.Pair):
        compare.run(asked)
    else:
        run.run(asked)


if __name__ == "__main__":
    sys.exit(main())
