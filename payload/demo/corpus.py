"""Chat rows for the demo: short, varied English and arithmetic whose answers follow from the question.

Every row is made from ``(seed, split, index)`` alone. A prompt belongs to the held-out rows when the hash of its
text says so, so that no held-out prompt is ever in the training rows, whatever the seeds and counts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Literal

Split = Literal["train", "eval"]
Row = dict[str, list[dict[str, str]]]

_HELD_OUT_SHARE = 8
"""One prompt in this many is held out."""

_ANIMALS = {
    "red fox": ("the forest", "mice and berries", "a long tail"),
    "grey wolf": ("the mountains", "deer and hares", "sharp teeth"),
    "brown bear": ("the deep woods", "honey and fish", "thick fur"),
    "white owl": ("an old barn", "mice and beetles", "soft wings"),
    "green frog": ("a quiet pond", "flies and worms", "strong legs"),
    "sea otter": ("the cold sea", "crabs and clams", "warm fur"),
    "honey bee": ("a wooden hive", "nectar and pollen", "four wings"),
    "wild horse": ("the open plain", "grass and herbs", "a fast gallop"),
    "black cat": ("a farm house", "mice and milk", "quiet paws"),
    "blue whale": ("the wide ocean", "krill and small fish", "a huge heart"),
}
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo")
_THINGS = (
    "apples",
    "books",
    "coins",
    "drums",
    "eggs",
    "flags",
    "hats",
    "keys",
    "lamps",
    "maps",
    "pears",
    "stones",
)
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple")
_PLACES = ("the park", "the market", "the library", "the station", "the river", "the school", "the garden")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def _counting(rng: random.Random) -> tuple[str, str]:
    first, length, step = rng.randrange(0, 60), rng.randrange(6, 12), rng.choice((1, 1, 2))
    numbers = [first + step * index for index in range(length)]
    by = "" if step == 1 else " in steps of two"
    return f"Count from {numbers[0]} to {numbers[-1]}{by}.", ", ".join(map(str, numbers)) + "."


def _animal(rng: random.Random) -> tuple[str, str]:
    animal = rng.choice(sorted(_ANIMALS))
    name, place = rng.choice(_NAMES), rng.choice(_PLACES)
    home, food, body = _ANIMALS[animal]
    return (
        f"{name} saw a {animal} near {place}. What should {name} know about it?",
        f"The {animal} lives in {home} and eats {food}. It has {body}. "
        f"{name} should watch the {animal} near {place} and keep quiet.",
    )


def _shopping(rng: random.Random) -> tuple[str, str]:
    name, thing, place = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_PLACES)
    have, more = rng.randrange(1, 10), rng.randrange(1, 10)
    return (
        f"{name} has {have} {thing} and finds {more} more at {place}. How many {thing} are there now?",
        f"{name} had {have} {thing}. At {place} there were {more} more. "
        f"{have} plus {more} is {have + more}, so {name} now has {have + more} {thing}.",
    )


def _calendar(rng: random.Random) -> tuple[str, str]:
    names, kind = rng.choice(((_DAYS, "days"), (_MONTHS, "months")))
    start, count = rng.randrange(len(names)), rng.randrange(3, 7)
    following = [names[(start + offset) % len(names)] for offset in range(1, count + 1)]
    name = rng.choice(_NAMES)
    return (
        f"{name} asks: which {count} {kind} come after {names[start]}?",
        f"{name}, after {names[start]} come " + ", ".join(following[:-1]) + f" and {following[-1]}.",
    )


def _gift(rng: random.Random) -> tuple[str, str]:
    giver, friend = rng.sample(_NAMES, 2)
    colour, thing, place = rng.choice(_COLOURS), rng.choice(_THINGS), rng.choice(_PLACES)
    return (
        f"Tell a story: {giver} gives {friend} some {colour} {thing} at {place}.",
        f"One day {giver} went to {place} with some {colour} {thing}. There {giver} met {friend} and said: "
        f'"These {colour} {thing} are for you." {friend} was very happy and thanked {giver}.',
    )


_FAMILIES: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _counting, _animal, _shopping, _calendar, _gift,
)  # fmt: skip


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out rows; depends on its text alone."""
    return hashlib.sha256(prompt.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def rows(split: Split, count: int, seed: int = 0) -> Iterator[Row]:
    """Yield ``count`` rows ``{"messages": [user, assistant]}``; training rows may repeat, held-out rows do not."""
    rng = random.Random(f"{seed}/{split}")
    seen: set[str] = set()
    made = 0
    while made < count:
        prompt, answer = _FAMILIES[rng.randrange(len(_FAMILIES))](rng)
        if is_held_out(prompt) != (split == "eval") or (split == "eval" and prompt in seen):
            continue
        seen.add(prompt)
        made += 1
        yield {
            "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}],
        }
