"""Chat prompts to train a drafter of a small instruct model on, made from subjects and questions.

    python -m benchmarks.prompts --train prompts.jsonl --held-out held-out.jsonl

Every prompt asks one question of one subject, or of two. The held-out prompts are about subjects that no training
prompt mentions. Rows are ``{"messages": [{"role": "user", "content": ...}]}``: the recipe's ``data.regenerate`` has the
target answer them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

SUBJECTS = {
    "animal": (
        "cat", "dog", "horse", "elephant", "dolphin", "eagle", "owl", "penguin", "tiger", "wolf", "rabbit", "bee",
        "ant", "spider", "shark", "whale", "octopus", "frog", "snake", "turtle", "parrot", "bat", "bear", "fox",
        "deer", "lion", "giraffe", "kangaroo", "camel", "goat", "sheep", "duck", "squirrel", "hedgehog", "otter",
        "seal", "crab", "butterfly", "moth", "salmon",
    ),
    "food": (
        "bread", "cheese", "rice", "pasta", "soup", "salad", "chocolate", "coffee", "tea", "honey", "yogurt", "apples",
        "potatoes", "tomatoes", "onions", "garlic", "olive oil", "eggs", "pancakes", "pizza", "noodles", "beans",
        "lentils", "carrots", "mushrooms", "cookies", "butter", "oranges", "bananas", "almonds",
    ),
    "place": (
        "Paris", "London", "Tokyo", "Rome", "Cairo", "Sydney", "Berlin", "Madrid", "Toronto", "Mumbai", "Lima",
        "Nairobi", "Athens", "Vienna", "Dublin", "Oslo", "Lisbon", "Seoul", "Istanbul", "Venice", "the Amazon",
        "the Sahara", "the Alps", "Iceland", "New Zealand", "Brazil", "Kenya", "Norway", "Japan", "Egypt",
    ),
    "idea": (
        "gravity", "photosynthesis", "evolution", "electricity", "magnetism", "the water cycle", "plate tectonics",
        "the immune system", "climate change", "inflation", "democracy", "supply and demand", "friction", "energy",
        "density", "probability", "fractions", "the solar system", "black holes", "atoms", "molecules", "DNA",
        "cells", "ecosystems", "vaccines", "sound waves", "light", "heat", "volcanoes", "earthquakes", "tides",
        "seasons", "genetics", "chemical reactions", "pollination", "recycling", "the food chain", "osmosis",
        "momentum", "the speed of light",
    ),
    "technology": (
        "the internet", "a database", "machine learning", "encryption", "an operating system", "a compiler",
        "a web browser", "cloud computing", "a search engine", "version control", "an algorithm", "a neural network",
        "a smartphone", "a solar panel", "a wind turbine", "an electric car", "a 3D printer", "a satellite",
        "a microscope", "a telescope", "a refrigerator", "a battery", "a robot", "a programming language",
        "open source software", "a spreadsheet", "email", "a password manager", "a router", "a bicycle",
    ),
    "skill": (
        "cooking", "painting", "swimming", "writing", "public speaking", "gardening", "playing the guitar",
        "playing chess", "running", "yoga", "photography", "learning a language", "programming", "drawing",
        "budgeting", "time management", "meditation", "dancing", "knitting", "woodworking", "negotiation",
        "teamwork", "critical thinking", "reading faster", "baking", "hiking", "cycling", "singing", "studying",
        "job interviews",
    ),
    "virtue": (
        "friendship", "courage", "patience", "honesty", "kindness", "gratitude", "curiosity", "creativity",
        "forgiveness", "hope", "loyalty", "humility", "perseverance", "trust", "empathy", "generosity", "respect",
        "responsibility", "love", "wisdom",
    ),
}  # fmt: skip

ANY = (
    "Write a short poem about {}.",
    "Write a short story about {}.",
    "Write a haiku about {}.",
    "Write a short paragraph about {}.",
    "Give me five facts about {}.",
    "Give me three questions a child might ask about {}.",
    "Write a title and a one-paragraph summary for an article about {}.",
    "Explain {} to a five-year-old.",
    "Write a dialogue between two friends about {}.",
    "Make a list of ten words related to {}.",
    "Write a limerick about {}.",
    "Write a short speech about {}.",
    "Write an email to a friend about {}.",
    "Write a letter to the editor about {}.",
    "Describe {} in three sentences.",
    "Why is {} important?",
    "Write a quiz with three questions and answers about {}.",
    "What is a common misconception about {}?",
    "Suggest three essay topics about {}.",
    "Write a tweet about {}.",
    "Tell me something surprising about {}.",
    "Write a diary entry that mentions {}.",
    "Create a short lesson plan about {}.",
    "Write a product description or advertisement that features {}.",
    "What would the world be like without {}?",
    "Summarize what people should know about {}.",
)
ABOUT = {
    "animal": (
        "What does {} eat?",
        "Where does {} live?",
        "How does {} protect itself?",
        "Write a fable with {} as the hero.",
        "Compare {} with a mouse.",
        "How does {} raise its young?",
        "What makes {} special?",
        "Name five other animals like {}.",
        "What should I do if I find {} that is hurt?",
    ),
    "food": (
        "Give me a simple recipe with {}.",
        "How should I store {}?",
        "Is it healthy to eat or drink {}?",
        "What goes well with {}?",
        "Where does {} come from?",
        "Write a shopping list for a dinner with {}.",
        "Write a restaurant review that praises the {}.",
        "How is {} made or grown?",
    ),
    "place": (
        "What should I see in {}?",
        "Plan a three-day trip to {}.",
        "What is {} famous for?",
        "What is the weather like in {}?",
        "Write a postcard from {}.",
        "What food should I try in {}?",
        "Tell me about the history of {}.",
        "What should I pack for a trip to {}?",
    ),
    "idea": (
        "What is {}?",
        "How does {} work?",
        "Give an example of {} in everyday life.",
        "Who discovered or first described {}?",
        "How do scientists study {}?",
        "Explain {} step by step.",
        "What are the main causes and effects of {}?",
        "Describe a simple experiment about {}.",
        "Write a glossary of five terms about {}.",
    ),
    "technology": (
        "How does {} work?",
        "What are the advantages and disadvantages of {}?",
        "Who invented {}?",
        "How has {} changed our lives?",
        "How do I choose or start using {}?",
        "Explain step by step how {} is built.",
        "What is the future of {}?",
        "What are the risks of {}?",
    ),
    "skill": (
        "How can I get better at {}?",
        "Give me five tips for {}.",
        "What do I need to start with {}?",
        "What are the benefits of {}?",
        "Make a weekly plan to practice {}.",
        "What mistakes do beginners make in {}?",
        "Write a motivational message for someone who is new to {}.",
        "How long does it take to learn {}?",
    ),
    "virtue": (
        "What is {}?",
        "Tell a story that teaches {}.",
        "How can parents teach {} to children?",
        "Give an example of {} at work.",
        "What is the opposite of {}, and why does it matter?",
        "Write a quote about {} and explain it.",
        "How can I show more {} in my life?",
    ),
}
TWO = (
    "Compare {} and {}.",
    "What do {} and {} have in common?",
    "Write a short story about {} and {}.",
    "Write a poem that mentions {} and {}.",
    "Which would you rather write an essay about, {} or {}, and why?",
    "Write a dialogue between someone who loves {} and someone who prefers {}.",
    "Make a table of differences between {} and {}.",
    "Explain the difference between {} and {} to a child.",
    "Write a riddle whose answer is {} and one whose answer is {}.",
    "Give three facts about {} and three about {}.",
    "Write a headline and a short news report about {} and {}.",
    "How could {} and {} be part of one school project?",
)
MANNERS = ("{}", "{} Keep it short.", "Please help me. {}", "{} Use simple words.")
"""Ways to ask the same thing, so that a subject's answers differ more than its questions do."""

HELD_OUT_SHARE = 0.1


def prompts(seed: int = 0, pairs: int = 60_000) -> tuple[list[str], list[str]]:
    """Training prompts and held-out ones, each shuffled; their subjects are disjoint.

    All there are of one subject, and of two subjects ``pairs`` to train on and a tenth of that held out.
    """
    generator = random.Random(seed)
    train: list[str] = []
    held_out: list[str] = []
    named_train: list[str] = []
    named_held_out: list[str] = []
    for kind, subjects in SUBJECTS.items():
        kept_back = set(generator.sample(subjects, max(1, round(HELD_OUT_SHARE * len(subjects)))))
        for subject in subjects:
            named = f"the {subject}" if kind == "animal" else subject
            (named_held_out if subject in kept_back else named_train).append(named)
            asked = [question.format(named) for question in ANY]
            asked += [question.format(named) for question in ABOUT[kind]]
            (held_out if subject in kept_back else train).extend(
                manner.format(question) for question in asked for manner in MANNERS
            )
    train += _of_two(named_train, pairs, generator)
    held_out += _of_two(named_held_out, round(HELD_OUT_SHARE * pairs), generator)
    generator.shuffle(train)
    generator.shuffle(held_out)
    return train, held_out


def _of_two(subjects: Sequence[str], count: int, generator: random.Random) -> list[str]:
    """``count`` different prompts of two subjects, or as many as there are."""
    number = len(subjects) * (len(subjects) - 1) * len(TWO)
    found = []
    for choice in generator.sample(range(number), min(count, number)):
        pair, question = divmod(choice, len(TWO))
        first, other = divmod(pair, len(subjects) - 1)
        second = other + (other >= first)
        found.append(TWO[question].format(subjects[first], subjects[second]))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pairs", type=int, default=60_000, help="prompts of two subjects (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    for path, made in zip((given.train, given.held_out), prompts(given.seed, given.pairs), strict=True):
        rows = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in made)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        sys.stdout.write(f"{path}: {len(made)} prompts\n")


if __name__ == "__main__":
    main()
