"""Make questions of arithmetic in any number, as traffic to learn from; no held-out prompt is among them."""

from __future__ import annotations

import random

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
    "{A} walks {j} miles in an hour. How long does {A} take for {m} miles, in minutes?",
    "A bus has {m} seats. {n} are taken, and {j} people get off at each of {k} stops. How many seats are free then?",
    "A class of {m} children is split into groups of {j}. How many children are left without a full group?",
    "{A} sleeps {k} hours a night. How many hours is that in {j} weeks?",
    "The sum of two numbers is {big}. One of them is {m}. What is the other?",
    "{A} has ${big}. A coat costs ${m}, and shoes cost half as much. How much is left after {A} buys both?",
    "A shelf holds {n} books. A library has {k} such shelves, and {m} books are lent. How many are on the shelves?",
    "{A} types {n} words a minute. How many words does {A} type in {k} minutes, if {j} of every 10 are right?",
    "A tank holds {big} litres. It loses {j} litres an hour. How much is in it after {k} hours, if it was full?",
    "{A} cooks {k} meals a week and freezes a third of them. How many meals does {A} freeze in {j} weeks?",
    "A ticket costs ${j} for children and ${n} for adults. What do {k} children and 2 adults pay together?",
    "{A} plants {k} rows of {j} trees, and then {m} bushes. How many plants is that?",
    "In a box are {m} red, {n} blue and {k} green balls. How many balls are not red?",
    "{A} is {j} years older than {B}, who is {m}. What is the sum of their ages?",
    "{A} drinks {j} glasses of water a day. A glass holds {n} centilitres. How many centilitres is that in {k} days?",
    "A phone costs ${big}. {A} pays ${m} at once, and the rest in {j} equal parts. How much is each part?",
    "Every {k} minutes a machine makes {j} toys. How many does it make in {m} hours?",
    "{A} scores {m}, {n} and {k} points in three games. What is the average?",
    "A rectangle is {m} feet long and {n} feet wide. What is the length of a fence around it?",
    "The price of a lamp is ${big}. It is on sale at 25% off. How much does {A} pay for {j} lamps?",
    "{A} reads half of a book of {big} pages on Monday and {n} pages on Tuesday. How many pages are left?",
    "{A} sells {m} cakes at ${j} each. The flour cost ${n}. How much does {A} earn?",
    "{A} gives {j} {things} to each of {k} friends and has {n} left. With how many did {A} begin?",
    "Of {big} guests half come by car, {m} by train and the others on foot. How many walk?",
    "{A} works from 9 in the morning to 5 in the afternoon, {j} days a week. How many hours is that in {k} weeks?",
    "A recipe for {j} people takes {n} eggs. How many eggs does {A} need for {k} times as many people?",
    "{A} needs {big} points. After {k} rounds of {j} points, how many are missing?",
    "A dog eats {j} cups of food a day, and a cat eats {k}. How many cups do both eat in {n} days?",
    "{A} pays ${n} a month for the gym and ${j} each time for the pool. What does {A} pay in a month with {k} swims?",
    "{A} has {k} coins of 25 cents and {j} of 10 cents. How many cents is that?",
    "{A} drives {big} miles. The car needs a gallon for every {j} miles, at ${k} a gallon. What does the fuel cost?",
    "{A} folds {n} cranes a day. {B} folds {j} fewer. How many do they fold together in {k} days?",
    "{A} buys {j} packs of {k} pens and loses {n} of them. How many are left?",
    "A snail climbs {k} feet by day and slips back {j} by night. How far has it come after {n} days and nights?",
    "Twice as many girls as boys sing in a choir of {m} people, {n} of them adults. How many are children?",
    "{A} puts {n} photos on each page of an album with {m} pages. {k} pages stay empty. How many photos are in it?",
)


def arithmetic(count: int, seed: int) -> list[str]:
    """Return `count` different questions of arithmetic as prompts."""
    rng = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        made[f"Question: {_question(rng)}\nAnswer:"] = None
    return list(made)


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
