"""Traffic to learn from, as much as is wanted: worked arithmetic and Python, written from patterns of our own.

What is measured with are `benchmarks/prompts`, which no pattern gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

NAMES = [
    "Ada",
    "Ben",
    "Carla",
    "Dmitri",
    "Elif",
    "Farid",
    "Greta",
    "Hassan",
    "Ines",
    "Jonas",
    "Keiko",
    "Lars",
    "Maya",
    "Niko",
    "Olga",
    "Pablo",
    "Quentin",
    "Rosa",
    "Sven",
    "Tariq",
    "Uma",
    "Vera",
    "Wei",
    "Yusuf",
    "Zoe",
]
THINGS = [
    "apples",
    "marbles",
    "stickers",
    "pencils",
    "books",
    "coins",
    "shells",
    "cards",
    "stamps",
    "buttons",
    "eggs",
    "cookies",
    "tickets",
    "beads",
    "oranges",
    "candles",
    "bricks",
    "bottles",
    "plums",
    "magnets",
]
PLACES = ["market", "school", "library", "workshop", "farm", "bakery", "museum", "garden", "station", "harbor"]

_ARITHMETIC = (
    "{name} has {a} {things}. A friend brings {b} more, and {c} of them get lost. How many {things} are left?",
    "There are {a} boxes of {things} at the {place}, with {b} in each. If {c} {things} are sold, how many remain?",
    "{name} buys {d} bags of {things} for ${e} each and pays with a ${f} bill. How much change does {name} get?",
    "{name} reads {b} pages a day. How many pages does {name} read in {d} weeks?",
    "A box holds {b} {things}. The {place} orders {d} boxes and gives {c} {things} away. How many are kept?",
    "{name} and {other} collect {things}. {name} finds {a} and {other} finds twice as many. How many do they have together?",
    "The {place} opens for {d} hours a day. Each hour {b} people come. How many people come in {e} days?",
    "{name} earns ${b} an hour and works {d} hours a day. How much does {name} earn in {e} days?",
    "Each of {d} children gets {e} {things}. There were {f} {things} at first. How many are left over?",
    "{name} walks {d} miles in the morning and {e} miles in the evening, every day. How many miles is that in a week?",
    "A rope of {f} feet is cut into {d} pieces of {e} feet. How many feet of rope remain?",
    "{name} has {f} {things} and gives half of them to {other}. Then {name} gets {c} more. How many {things} now?",
    "One of the {things} costs ${d}. {name} buys {b} of them, and {other} buys {c} fewer. How much do they pay in all?",
    "{name} plants {d} rows of {b} trees. {c} of the trees die. How many trees live?",
    "In the {place} there are {b} tables with {d} seats each. {a} guests sit down. How many seats stay empty?",
    "{name} saves ${b} each month. After {d} months {name} spends ${c}. How much is left?",
    "A train has {d} cars with {b} seats each. If {a} seats are taken, how many are free?",
    "{name} bakes {d} trays of {b} cookies and eats {e}. The rest go to the {place}. How many go there?",
    "{other} is {e} years older than {name}, who is {b}. How old will {other} be in {d} years?",
    "{name} fills {d} jars with {e} {things} each and has {c} left. How many {things} did {name} have?",
    "The {place} sells {a} tickets on Monday and {c} fewer on Tuesday. How many tickets is that in both days?",
    "{name} needs {f} {things} for a party. {name} has {b} and {other} lends {c}. How many more are needed?",
    "A car uses {e} gallons of gas a day. Gas costs ${d} a gallon. How much is that for {b} days?",
    "{name} scores {b} points in each of {d} games and {c} in the last one. What is the total score?",
)
VERBS = [
    "load",
    "save",
    "parse",
    "format",
    "merge",
    "split",
    "count",
    "find",
    "remove",
    "update",
    "check",
    "read",
    "write",
    "copy",
    "filter",
    "sort",
    "close",
    "open",
]
NOUNS = [
    "config",
    "lines",
    "records",
    "users",
    "header",
    "path",
    "message",
    "table",
    "token",
    "file",
    "index",
    "cache",
    "queue",
    "event",
    "field",
    "row",
    "node",
    "item",
]
_DOCSTRINGS = (
    "Return the {noun} that belongs to {other}.",
    "{Verb} each {noun} and return how many there were.",
    "{Verb} the {noun}, or raise ValueError if there is none.",
    "Helper that will {verb} a {noun} from the given {other}.",
    "{Verb} all {noun} objects in *{other}*.",
)
_CODE = (
    'import {module}\n\n\ndef {verb}_{noun}({other}):\n    """{doc}"""\n',
    'class {Noun}{Verb}er:\n    """{doc}"""\n\n    def __init__(self, {other}):\n        self.{other} = {other}\n',
    'def {verb}_{noun}({other}, default=None):\n    """{doc}"""\n    if {other} is None:\n',
    'import {module}\nimport sys\n\n\ndef main():\n    """{doc}"""\n',
    "def test_{verb}_{noun}(self):\n    {other} = self.make_{other}()\n    ",
)
_MODULES = [
    "os",
    "re",
    "json",
    "time",
    "string",
    "logging",
    "socket",
    "threading",
    "itertools",
    "functools",
    "collections",
]


def arithmetic(seed: int) -> Iterator[str]:
    """Questions without end, seldom one twice."""
    draw = random.Random(f"arithmetic {seed}")
    while True:
        name, other = draw.sample(NAMES, 2)
        pattern = draw.choice(_ARITHMETIC)
        small = {"d": draw.randint(2, 9), "e": draw.randint(2, 12)}
        large = {
            "a": draw.randint(20, 90),
            "b": draw.randint(10, 40),
            "c": draw.randint(2, 9),
            "f": draw.randint(100, 150),
        }
        words = {"name": name, "other": other, "things": draw.choice(THINGS), "place": draw.choice(PLACES)}
        yield f"Question: {pattern.format(**words, **small, **large)}\nAnswer:"


def code(seed: int) -> Iterator[str]:
    """Beginnings of Python files without end."""
    draw = random.Random(f"code {seed}")
    while True:
        noun, other = draw.sample(NOUNS, 2)
        verb = draw.choice(VERBS)
        words = {"noun": noun, "other": other, "verb": verb, "Verb": verb.title(), "Noun": noun.title()}
        doc = draw.choice(_DOCSTRINGS).format(**words)
        yield draw.choice(_CODE).format(**words, doc=doc, module=draw.choice(_MODULES))
