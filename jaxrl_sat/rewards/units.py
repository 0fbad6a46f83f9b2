"""Units that are told from each other and converted: 12 cm is 12, it is not 12 m, and it is 0.12 m."""

from __future__ import annotations

import re
from fractions import Fraction

_SPELLINGS = """
length 1/1000 mm millimeter millimetre
length 1/100 cm centimeter centimetre
length 1/10 dm decimeter decimetre
length 1 m meter metre
length 1000 km kilometer kilometre
imperial length 1 in inch inches
imperial length 12 ft foot feet
imperial length 36 yd yard
imperial length 63360 mi mile
mass 1/1000 mg milligram
mass 1 g gram
mass 1000 kg kilogram
imperial mass 16 lb lbs pound
imperial mass 1 oz ounce
ton 1 ton tonne
time 1/1000 ms millisecond
time 1 s sec second
time 60 min minute
time 3600 h hr hour
time 86400 day
time 604800 week
month 1 month
month 12 year yr
volume 1/1000 ml milliliter millilitre
volume 1 l liter litre
gallon 1 gal gallon
cup 1 cup
pint 1 pint
quart 1 quart
angle 1 degree deg
radian 1 rad radian
money 1 dollar usd bucks
money 1/100 cent
euro 1 euro eur
clock 1 am
clock -1 pm
mph 1 mph
speed 1 km/h kph kmh
speed 18/5 m/s
"""
_LINE = re.compile(r"(.+?) (-?\d+(?:/\d+)?) (\S+)(.*)")
_LINES = [match.groups() for match in map(_LINE.fullmatch, _SPELLINGS.strip().splitlines()) if match]
UNITS = {spelling: name for _, _, name, others in _LINES for spelling in (name, *others.split())}
"""Every spelling of a unit, in lower case and the singular, to its one name."""
_SIZES = {name: (dimension, Fraction(size)) for dimension, size, name, _ in _LINES if Fraction(size) > 0}
_SYMBOLS = frozenset("NJWVAKCFTHL")
"""Capital letters that are units behind a number in upright type; their sizes are not known here."""
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
"""Words that multiply the number before them."""

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


def is_symbol(text: str) -> bool:
    """Whether one letter in upright type behind a number is a unit."""
    return unit(text) is not None or text in _SYMBOLS


def ratio(one: str, other: str) -> Fraction | None:
    """How many of the unit `other` one of `one` is, by their names; None where they measure different things."""
    (name, _, power), (other_name, _, other_power) = one.partition("^"), other.partition("^")
    if power != other_power or name not in _SIZES or other_name not in _SIZES:
        return None
    (dimension, size), (other_dimension, other_size) = _SIZES[name], _SIZES[other_name]
    return (size / other_size) ** int(power or 1) if dimension == other_dimension else None
