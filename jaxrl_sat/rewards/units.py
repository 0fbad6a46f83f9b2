"""Units that are told from each other: 12 cm is 12, and it is not 12 m."""

from __future__ import annotations

import re

_SPELLINGS = """
mm millimeter millimetre
cm centimeter centimetre
dm decimeter decimetre
m meter metre
km kilometer kilometre
in inch inches
ft foot feet
yd yard
mi mile
mg milligram
g gram
kg kilogram
lb lbs pound
oz ounce
ton tonne
ms millisecond
s sec second
min minute
h hr hour
day
week
month
year yr
ml milliliter millilitre
l liter litre
gal gallon
degree deg
rad radian
dollar usd bucks
cent
euro eur
am
pm
mph
km/h kph kmh
m/s
"""
UNITS = {spelling: line.split()[0] for line in _SPELLINGS.strip().splitlines() for spelling in line.split()}
"""Every spelling of a unit, in lower case and the singular, to its one name."""

_POWER = re.compile(r"(square|sq|cubic|cu)\s+(.*)")
_EXPONENT = re.compile(r"(.*?)\^?\{?([23])\}?")


def unit(text: str) -> str | None:
    """The one name of a unit spelled somehow, with its power (cm^2), None for words that are no unit known here."""
    text = re.sub(r"[.\\\s]+", " ", text.lower()).strip()
    text = {"a m": "am", "p m": "pm"}.get(text, text)
    if power := _POWER.fullmatch(text):
        return _named(power.group(2), "2" if power.group(1).startswith("sq") else "3")
    if power := _EXPONENT.fullmatch(text):
        return _named(power.group(1).strip(), power.group(2))
    return _named(text, "")


def _named(word: str, power: str) -> str | None:
    name = UNITS.get(word) or UNITS.get(word.removesuffix("s"))
    return None if name is None else f"{name}^{power}" if power else name
