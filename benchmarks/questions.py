"""Prompts in any number, of our own making: small sums in words, and the beginnings of Python functions.

They are traffic to learn from. What is measured is `prompts/heldout.jsonl`, none of which is made here.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_WORDS = {
    "names": """Ada Alma Amir Anders Anna Ben Bruno Carla Carmen Chen Dana Daria David Elena Elif Emil Erik Eva Farah
        Felix Fiona George Gita Greta Hugo Ida Igor Ines Ivan Jack Jana Jin Joan Jose Julia Kai Karin Karl Laura Leon
        Lily Luis Maja Marco Maria Max Mei Mona Nico Nina Noor Oskar Pia Rafael Ravi Rita Sara Sofia Tariq Theo Tom Uma
        Vera Wei Yara""",
    "things": """apples pears plums eggs stamps coins shells stones pencils candles cards stickers buttons flowers
        bricks cookies muffins tickets cups plates chairs lamps balls kites toys bottles jars spoons bulbs tiles""",
    "place": "farm shop market library garden museum factory kitchen warehouse station",
    "holders": "boxes bags baskets crates trays shelves drawers bowls packs rows",
}
WORDS = {name: words.split() for name, words in _WORDS.items()}

TEMPLATES = (
    "{A} has {m} {things} and gets {n} more from {B}. How many {things} does {A} have now?",
    "{A} picks {m} {things} and {B} picks {n}. They share them equally. How many {things} does each of them get?",
    "A {place} has {k} {holders} with {n} {things} in each. How many {things} does it have?",
    "A {place} had {big} {things}. It sold {m} in the morning and {n} in the afternoon. How many {things} are left?",
    "{A} reads {n} pages a day. How many pages does {A} read in {k} weeks?",
    "{A} earns ${n} an hour and works {k} hours a day, {j} days a week. How much does {A} earn in a week?",
    "{A} buys {k} {things} for ${j} each and pays with a ${big} note. How much money does {A} get back?",
    "{A} is {m} years old. {B} is twice as old as {A}. How old will {B} be in {k} years?",
    "{A} has three times as many {things} as {B}. {B} has {n}. How many {things} do they have together?",
    "There are {big} {things} in {k} {holders}. {A} takes {j} from each. How many {things} are left in all?",
    "{A} runs {j} miles on weekdays and {k} miles on each day of the weekend. How far does {A} run in a week?",
    "A train goes {n} miles an hour. How many miles does it go in {k} hours?",
    "{A} bakes {k} cakes with {j} eggs each. Eggs come in packs of 12. How many packs does {A} need?",
    "{A} saves ${j} every week. After {k} weeks {A} buys a game for ${n}. How much money is left?",
    "Each of {k} children brings {j} {things}. {m} of them are broken. How many {things} are whole?",
    "A book has {big} pages. {A} has read {m} pages, and {B} has read half of the book. Who has read more, and by how"
    " many pages?",
    "{A} fills {k} {holders} with {n} {things} each and has {j} left over. How many {things} were there?",
    "{A} and {B} together have {big} {things}. {A} has {m} of them. How many more does {B} have than {A}?",
    "A {place} opens {k} days a week and has {n} visitors a day. How many visitors does it have in {j} weeks?",
    "{A} cuts a rope of {big} feet into pieces of {j} feet. How many pieces are there after {k} of them are lost?",
    "{A} spends {k} minutes on each of {j} exercises and then {n} minutes on a walk. How many minutes is that?",
    "A {place} orders {m} {things} on Monday, twice as many on Tuesday and {n} on Friday. How many does it order?",
    "{A} pays ${m} for {things} and a quarter of that for a bag. How much does {A} pay in total?",
    "{A} grows {big} {things}. 20% of them are given to {B}, and {n} are sold. How many {things} does {A} keep?",
)


def arithmetic(count: int, seed: int) -> list[str]:
    """Questions, no two alike."""
    rng = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        made[f"Question: {_question(rng)}\nAnswer:"] = None
    return list(made)


def code(count: int, seed: int) -> list[str]:
    """Beginnings of functions of the standard library, with up to eight lines before them."""
    rng = random.Random(seed)
    starts = list(_functions(Path(sysconfig.get_path("stdlib"))))
    rng.shuffle(starts)
    return starts[:count]


def _question(rng: random.Random) -> str:
    first, second = rng.sample(WORDS["names"], 2)
    return rng.choice(TEMPLATES).format(
        A=first,
        B=second,
        things=rng.choice(WORDS["things"]),
        place=rng.choice(WORDS["place"]),
        holders=rng.choice(WORDS["holders"]),
        j=rng.randint(2, 9),
        k=rng.randint(3, 12),
        m=rng.randint(10, 60),
        n=rng.randint(5, 40),
        big=10 * rng.randint(12, 60),
    )


def _functions(root: Path) -> Iterator[str]:
    for path in sorted(root.glob("*.py")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        for number, line in enumerate(lines):
            if line.lstrip().startswith("def ") and line.rstrip().endswith(":"):
                begin = max(0, number - number % 8)
                yield "".join(lines[begin : number + 1])
