"""What became of the rows that a set was prepared from: counts, the first rows of each kind by name, the report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

EXAMPLES = 5
"""Rows of a kind that are named."""


@dataclasses.dataclass
class Account:
    """Of one source: rows read, problems kept, how many rows were dropped for what, and what was noted of kept ones."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    noted: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def drop(self, reason: str, place: str, detail: str = "") -> None:
        """Count a row that is dropped; name it if it is among the first."""
        self.dropped[reason] += 1
        self._name(reason, place, detail)

    def note(self, what: str, place: str, detail: str = "") -> None:
        """Count a row that is kept, though; name it if it is among the first."""
        self.noted[what] += 1
        self._name(what, place, detail)

    def _name(self, what: str, place: str, detail: str) -> None:
        named = self.examples.setdefault(what, [])
        if len(named) < EXAMPLES:
            named.append(f"{place}: {detail[:200]}" if detail else place)

    def to_dict(self) -> dict[str, Any]:
        """As the report has it, the commonest first."""
        counts = {"dropped": dict(self.dropped.most_common()), "noted": dict(self.noted.most_common())}
        return {"read": self.read, "kept": self.kept, **counts, "examples": self.examples}


def reasons(accounts: Mapping[str, Account]) -> str:
    """The commonest reasons for dropping rows of all sources, in brackets; nothing where none was."""
    total = sum((account.dropped for account in accounts.values()), Counter[str]())
    return f" ({', '.join(f'{count} dropped: {what}' for what, count in total.most_common(3))})" if total else ""


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for people, line by line."""
    rows = [("source", "split", "weight", "read", "kept")]
    for source in report["sources"]:
        weight = "" if source["weight"] is None else str(source["weight"])
        rows.append((source["name"], source["split"], weight, str(source["read"]), str(source["kept"])))
    yield from _aligned(rows)
    for source in report["sources"]:
        for kind in ("dropped", "noted"):
            for what, count in source[kind].items():
                yield f"{source['name']}: {count} {'dropped' if kind == 'dropped' else 'kept'}: {what}"
                yield from (f"    {example}" for example in source["examples"].get(what, ()))
    for split, figures in report["splits"].items():
        tokens = ", ".join(f"{name} {value}" for name, value in (figures["tokens"] or {}).items())
        yield f"{split}: {figures['problems']} problems{f'; tokens: {tokens}' if tokens else ''}"
    yield f"sha256 of the records: {report['sha256']}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
