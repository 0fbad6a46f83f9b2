"""One worker of the pool: python -m jaxrl_sat.rewards.worker reads answers on its input and says which are the same.

A line in is a JSON list [question, found, answer]; a line out is "right" or "wrong". A case over its time or memory
ends the process; whoever asked sees the pipe close.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys

CPU_SECONDS = 2.0
"""Processor time of one case."""
MEMORY_BYTES = 512 * 2**20
"""Address space of the whole process."""


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from jaxrl_sat.rewards.equivalence import equivalent, readable

    output = sys.stdout
    output.write("ready\n")
    output.flush()
    for line in sys.stdin:
        question, found, answer = json.loads(line)
        # Its default action ends the process: no handler could break into a long operation of C.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        right = readable(answer) if question == "readable" else equivalent(found, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        output.write("right\n" if right else "wrong\n")
        output.flush()


if __name__ == "__main__":
    main()
