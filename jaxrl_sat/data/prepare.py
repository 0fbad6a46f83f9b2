"""Files of problems to one prepared set: read, joined, deduplicated, filtered, and an account of what was dropped.

Test sources are read first, then the others, each kind in the order given, and the first copy of a problem stays: so
nothing that is tested is trained on. What stays waits on disk; in memory are a hash of each problem and its answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrl_sat import rewards
from jaxrl_sat.data import records, schemas
from jaxrl_sat.data.account import Account, reasons
from jaxrl_sat.data.builder import FIELDS, write_prepared
from jaxrl_sat.data.schemas import Example
from jaxrl_sat.types import InputError

CHUNK = 4096
"""Problems whose answers the verifier is asked about at once."""
TOLD = 100_000
"""Rows from one word on progress to the next."""
UNFIT = 100
"""First rows without the columns of a problem, after which the whole file is said to have none."""
QUANTILES = {"least": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "most": 1.0}


@dataclasses.dataclass(frozen=True)
class Source:
    """A file, or the folder of a prepared set, whose problems are called `name`. `schema` None: found by the columns.

    `weight`: its share of the prompts of its split, relative to the others'.
    """

    file: Path
    name: str
    schema: str | None = None
    weight: float | None = None
    split: str = "train"


def _to_nobody(words: str) -> None:
    del words


@dataclasses.dataclass(frozen=True)
class Options:
    """What is kept.

    `on_bad_row`: a row without a problem, an answer or an id of its own is passed over and counted, or ends it all;
    `on_bad_file` the same of a file. `keep_unreadable`: answers that the verifier can only compare as text stay.
    `keep_conflicts`: of a problem with two answers the first copy stays. `instruction` is put behind every prompt.
    `count_tokens`: of a prompt, as the model will read it; more than `max_tokens` (0: any) are too many. `progress` is
    told, in words, how far it has come.
    """

    on_bad_row: Literal["skip", "refuse"] = "skip"
    on_bad_file: Literal["skip", "refuse"] = "refuse"
    keep_unreadable: bool = False
    keep_conflicts: bool = False
    instruction: str = ""
    count_tokens: Callable[[str], int] | None = None
    max_tokens: int = 0
    progress: Callable[[str], object] = _to_nobody


@dataclasses.dataclass(frozen=True, slots=True)
class _First:
    """The first copy of a problem: its number among these, and where it stands."""

    number: int
    split: str
    place: str
    answer: str


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A first copy, as it will be stored."""

    number: int
    split: str
    place: str
    record: dict[str, str]


class _Refused(InputError):
    """A row that is refused; a file that may be skipped does not excuse it."""


def read_examples(file: Path, schema: str | None = None, split: str = "train") -> Iterator[Example]:
    """The problems of a file as they stand. Raises `InputError` for a file or a row that is none, by file and row."""
    for place, found in _examples(Source(file, file.stem, schema, split=split)):
        if isinstance(found, str):
            raise InputError(f"{place}: {found}; allowed: a row with a prompt and an answer")
        yield found


def prepare(name: str, sources: Sequence[Source], options: Options, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Build the set `name` from `sources` under `folder`, which is empty. Returns its folder and the report in it.

    Raises `InputError` for what `options` refuse, and where a split is left with nothing.
    """
    accounts = {source.name: Account() for source in sources}
    waiting = folder / "waiting"
    conflicts = _gather(sources, options, accounts, waiting)
    splits = sorted({source.split for source in sources})
    kept = {split: folder / f"kept-{split}" for split in splits}
    lengths = _filter(waiting, conflicts, options, accounts, kept)
    for split, file in kept.items():
        if not file.stat().st_size:
            left = f"split {split!r} has no problem left{reasons(accounts)}"
            raise InputError(f"{left}; allowed: sources of which something stays")
    weights = {source.name: source.weight for source in sources if source.weight is not None}
    stored = {split: functools.partial(_stored, file) for split, file in kept.items()}
    built = write_prepared(name, stored, weights, folder)
    report = {
        "name": name,
        "sources": [_source_report(name, sources, account) for name, account in accounts.items()],
        "splits": {split: _split_report(file, lengths[split]) for split, file in kept.items()},
        "instruction": options.instruction,
        "max_tokens": options.max_tokens,
        "sha256": _checksum(kept),
    }
    (built / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return built, report


# ----------------------------------------------------------------------------------------- the first of all copies


def _examples(source: Source) -> Iterator[tuple[str, Example | str]]:
    """Each row's place and its problem, or what is wrong with it. Raises `InputError` for a file that is none."""
    form, early, unfit = None, [], schemas.Unrecognised("holds no rows; allowed: a file with some")
    try:
        for row in records.rows(source.file, source.split, schemas.COLUMNS):
            place, found = f"{source.file}:{row.number}", row.problem
            if row.fields is not None:
                try:
                    form = form or schemas.recognise(row.fields, source.schema)
                    found = form.read(row.fields)
                except schemas.Unrecognised as error:
                    found, unfit = "no prompt or no answer", error
                except records.Unusable as error:
                    found = str(error)
            if form is None:
                early.append((place, found))
                if len(early) == UNFIT:
                    break
                continue
            yield from early
            early.clear()
            yield place, found
        if form is None:
            if not early or early[0][1] == "no prompt or no answer":
                raise unfit
            raise records.BadFile(f"holds no problem, its first row: {early[0][1]}; allowed: rows of a schema")
    except (records.BadFile, schemas.Unrecognised) as error:
        raise InputError(f"{source.file}: {error}") from error


def _usable(source: Source, options: Options, account: Account) -> Iterator[tuple[str, Example]]:
    """The rows of a source that hold a problem; the others are accounted for."""
    try:
        for place, found in _examples(source):
            account.read += 1
            if account.read % TOLD == 0:
                options.progress(f"{source.file}: {account.read} rows")
            if isinstance(found, str):
                _bad(options, account, place, found)
            else:
                yield place, found
    except _Refused:
        raise
    except InputError as error:
        if options.on_bad_file == "refuse":
            raise
        account.drop("file that cannot be used", str(error))


def _bad(options: Options, account: Account, place: str, reason: str, detail: str = "") -> None:
    if options.on_bad_row == "refuse":
        of = f" {detail[:80]!r}" if detail else ""
        raise _Refused(f"{place}: {reason}{of}; allowed: rows without fault, or --on-bad-row=skip")
    account.drop(reason, place, detail)


def _gather(
    sources: Sequence[Source], options: Options, accounts: Mapping[str, Account], waiting: Path
) -> dict[int, str]:
    """Write the first copy of each problem to `waiting`; returns which of them have a copy with another answer."""
    first: dict[bytes, _First] = {}
    ids: set[bytes] = set()
    doubts: dict[tuple[int, str], str] = {}
    with waiting.open("w", encoding="utf-8") as file:
        for source in sorted(sources, key=lambda source: source.split != "test"):
            account = accounts[source.name]
            for place, found in _usable(source, options, account):
                key = schemas.identity(found.prompt)
                if (seen := first.get(key)) is not None:
                    if seen.split != source.split:
                        account.drop(f"in the {seen.split} split", place, seen.place)
                        continue
                    account.drop("duplicate", place, f"of {seen.place}")
                    if seen.answer != found.answer:
                        doubts.setdefault((seen.number, found.answer), place)
                    continue
                own = f"{source.name}/{found.id or _row(source, sources, place)}"
                if (mark := hashlib.blake2b(own.encode(), digest_size=16).digest()) in ids:
                    _bad(options, account, place, "duplicate id", found.id)
                    continue
                ids.add(mark)
                first[key] = _First(len(first), source.split, place, found.answer)
                prompt = f"{found.prompt}\n\n{options.instruction}" if options.instruction else found.prompt
                values = (prompt, found.answer, source.name, own)
                one = _Waiting(first[key].number, source.split, place, dict(zip(FIELDS, values, strict=True)))
                file.write(json.dumps(dataclasses.asdict(one)) + "\n")
    answers = {one.number: one.answer for one in first.values()} if doubts else {}
    return _conflicts(doubts, answers)


def _row(source: Source, sources: Sequence[Source], place: str) -> str:
    """What a problem without an id is known by: its row, behind the number of its file from the name's second on."""
    row = place.rpartition(":")[2]
    files = [one.file for one in sources if one.name == source.name]
    number = files.index(source.file) + 1
    return row if number == 1 else f"{number}:{row}"


def _conflicts(doubts: Mapping[tuple[int, str], str], answers: Mapping[int, str]) -> dict[int, str]:
    """The problems of which a copy's answer is another one in the verifier's eyes, with its place and answer."""
    copies = [f"\\boxed{{{answer}}}" for _, answer in doubts]
    outcomes = rewards.outcomes(copies, [answers[number] for number, _ in doubts])
    wrong = [doubt for doubt, outcome in zip(doubts, outcomes, strict=True) if outcome is not rewards.Outcome.RIGHT]
    return {number: f"{answers[number]!r}, but {answer!r} at {doubts[number, answer]}" for number, answer in wrong}


# ----------------------------------------------------------------------------------------------- what is kept of them


def _filter(
    waiting: Path,
    conflicts: Mapping[int, str],
    options: Options,
    accounts: Mapping[str, Account],
    kept: Mapping[str, Path],
) -> dict[str, list[int]]:
    """Write what stays to the files `kept`, by split; returns the tokens of each prompt, where they are counted."""
    lengths: dict[str, list[int]] = {split: [] for split in kept}
    with contextlib.ExitStack() as closing:
        out = {split: closing.enter_context(file.open("w", encoding="utf-8")) for split, file in kept.items()}
        for one, reads in _checked(waiting, options):
            account = accounts[one.record["source"]]
            if not _stays(one, reads, conflicts.get(one.number), options, account):
                continue
            if options.count_tokens is not None:
                count = options.count_tokens(one.record["prompt"])
                if options.max_tokens and count > options.max_tokens:
                    account.drop(f"over {options.max_tokens} tokens", one.place, f"{count} tokens")
                    continue
                lengths[one.split].append(count)
            account.kept += 1
            out[one.split].write(json.dumps(one.record, ensure_ascii=False) + "\n")
    return lengths


def _checked(waiting: Path, options: Options) -> Iterator[tuple[_Waiting, bool]]:
    """What waits, with whether the verifier can read its answer."""
    for chunk in _chunks(waiting):
        if chunk[0].number:
            options.progress(f"{chunk[0].number} problems checked")
        readable = rewards.readable([one.record["answer"] for one in chunk])
        yield from zip(chunk, readable, strict=True)


def _chunks(waiting: Path) -> Iterator[list[_Waiting]]:
    with waiting.open(encoding="utf-8") as file:
        while chunk := [_Waiting(**json.loads(line)) for line in itertools.islice(file, CHUNK)]:
            yield chunk


def _stays(one: _Waiting, readable: bool, conflict: str | None, options: Options, account: Account) -> bool:
    """Whether a problem's answer may stay; either way accounted for."""
    if conflict and not options.keep_conflicts:
        account.drop("copies with other answers", one.place, conflict)
        return False
    if not readable and not options.keep_unreadable:
        _bad(options, account, one.place, "answer that the verifier cannot read", one.record["answer"])
        return False
    if conflict:
        account.note("copies with other answers", one.place, conflict)
    if not readable:
        account.note("answer that the verifier cannot read", one.place, one.record["answer"])
    return True


def _stored(file: Path) -> Iterator[dict[str, str]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _checksum(kept: Mapping[str, Path]) -> str:
    """SHA-256 over the records as JSON lines, each split's behind a line with its name."""
    digest = hashlib.sha256()
    for split, file in kept.items():
        digest.update(f"{split}\n".encode())
        with file.open("rb") as content:
            for piece in iter(functools.partial(content.read, 2**20), b""):
                digest.update(piece)
    return digest.hexdigest()


def _source_report(name: str, sources: Sequence[Source], account: Account) -> dict[str, Any]:
    own = [source for source in sources if source.name == name]
    files = [str(source.file) for source in own]
    return {"name": name, "files": files, "split": own[0].split, "weight": own[0].weight, **account.to_dict()}


def _split_report(file: Path, lengths: list[int]) -> dict[str, Any]:
    with file.open("rb") as lines:
        problems = sum(1 for _ in lines)
    at = {name: int(np.quantile(lengths, q, method="higher")) for name, q in QUANTILES.items()} if lengths else None
    return {"problems": problems, "tokens": at}
