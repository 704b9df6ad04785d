"""Writes chat prompts to train drafts on: tasks of many kinds about many subjects, shuffled, as JSON lines.

    python benchmarks/chat_prompts.py --count 1600 [--text FILE] [--also FILE…] [--without FILE…] > prompts.jsonl

`--text` gives passages to summarize and rewrite; `--also` mixes in prompts from other files, in any format that
`specdec bench --prompts` reads, and `--without` leaves out what a draft will be measured on. The same arguments always
write the same prompts.
"""

from __future__ import annotations

import json
import random
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from specdec.bench.prompts import pick_prompts

SUBJECTS = """
photosynthesis|the water cycle|black holes|plate tectonics|vaccines|antibiotics|the human heart|DNA|evolution|gravity
electricity|magnetism|nuclear power|solar panels|wind turbines|climate change|recycling|coral reefs|rainforests|bees
whales|volcanoes|earthquakes|hurricanes|the moon|the planet Mars|telescopes|computers|the internet|machine learning
databases|encryption|programming languages|operating systems|video games|smartphones|robots|electric cars|airplanes
railways|bicycles|bridges|skyscrapers|the printing press|the Roman Empire|ancient Egypt|the French Revolution
the Industrial Revolution|the Renaissance|the Second World War|the Silk Road|democracy|elections|constitutions
human rights|taxes|inflation|the stock market|banks|insurance|small businesses|marketing|supply chains|job interviews
time management|remote work|teamwork|leadership|negotiation|public speaking|studying for exams|learning a language
reading books|poetry|Shakespeare|the novel|movies|theatre|painting|photography|architecture|classical music|jazz
playing the guitar|dancing|chess|football|swimming|running|yoga|sleep|stress|healthy food|cooking pasta|baking bread
coffee|tea|chocolate|gardening|houseplants|dogs|cats|horses|birds|camping|hiking|travelling by train|Paris|Japan|India
Brazil|the Sahara|Antarctica|the ocean|rivers|mathematics|prime numbers|probability|fractions|geometry|statistics
philosophy|ethics|memory|emotions|friendship|parenting|schools|universities|libraries|museums|money|saving energy
"""
TASKS = """
What is {}?|Explain {} to a child.|Explain {} in simple terms.|Tell me about {}.|How does one get started with {}?
Write a short story about {}.|Write a poem about {}.|Give me five facts about {}.|Why does {} matter?
What are the advantages and disadvantages of {}?|Write a blog post about {}.|Write an email to a friend about {}.
What are common mistakes people make about {}?|Give a brief history of {}.|Write three quiz questions about {}.
I want to learn more about {}. Where should I begin?|Write an introduction to an essay on {}.
Imagine you are an expert on {}. What would you teach first?|Summarize what is known about {} in three sentences.
What will change about {} in the next twenty years?|Make a list of ten words that have to do with {}.
Write a dialogue between a teacher and a student about {}.|Who are some famous people connected with {}?
Compare {} with something similar.|What questions should I ask about {}?|Write a slogan and a short advert about {}.
Make a plan for a one-hour lesson about {}.|Describe {} using all five senses.|Is {} overrated? Argue both sides.
"""
CODE = """
Write a Python function that {}.|Write a JavaScript function that {}.|How do I write a program that {}?
Explain step by step how to write code that {}.
"""
JOBS = """
reverses a string|counts the words of a text|finds the largest number of a list|sorts a list of names
checks whether a word is a palindrome|computes the factorial of a number|lists the prime numbers up to n
merges two sorted lists|removes duplicates from a list|reads a CSV file and sums a column|computes the mean and median
converts Celsius to Fahrenheit|finds the most common letter of a text|generates random passwords|flattens nested lists
downloads a web page|parses a date|computes Fibonacci numbers|finds the longest line of a file|draws a bar chart
searches a sorted list|counts vowels|validates an email address|inverts a dictionary|transposes a matrix
"""
PASSAGE = r"""
Summarize the following text:\n\n{}|Rewrite this in modern English:\n\n{}|What is this passage about?\n\n{}
Who is speaking in this text, and what do they want?\n\n{}|Give this text a title and explain your choice:\n\n{}
Answer briefly: what happens here?\n\n{}
"""
SUMS = """
{n} has {a} {t} and buys {b} more. Each of {c} friends gets {d} of them. How many {t} does {n} have left?
A box of {t} costs ${a}. {n} buys {b} boxes and pays with ${e}. How much change does {n} get?
{n} reads {a} pages a day. How many days does a book of {e} pages take, and how many pages are left for the last day?
{n} sells {a} {t} in the morning and {b} in the afternoon at ${c} each. How much money does {n} make?
"""
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo")
THINGS = ("apples", "pencils", "books", "tickets", "stamps", "cards")
PASSAGES = 150
CHARACTERS = 700  # of a passage
RUN = 12  # words that two prompts do not share by chance


def entries(table: str) -> list[str]:
    """The entries of a table, which `|` and line ends divide."""
    return [entry.replace("\\n", "\n") for entry in re.split(r"[|\n]", table.strip()) if entry]


def sums(dice: random.Random, count: int) -> Iterator[str]:
    """Word problems."""
    for _ in range(count):
        a, b, c, d = (dice.randint(2, most) for most in (40, 20, 6, 5))
        numbers = {"a": a + c * d, "b": b, "c": c, "d": d, "e": 10 * (a + b) * c}
        yield dice.choice(entries(SUMS)).format(n=dice.choice(NAMES), t=dice.choice(THINGS), **numbers)


def passages(dice: random.Random, file: Path) -> Iterator[str]:
    """Tasks about pieces of a text."""
    text = file.read_text(encoding="utf-8")
    for _ in range(PASSAGES):
        start = dice.randrange(max(len(text) - CHARACTERS, 1))
        piece = text[start : start + dice.randint(CHARACTERS // 3, CHARACTERS)].partition("\n")[2].strip()
        yield dice.choice(entries(PASSAGE)).format(piece)


def runs(text: str) -> set[str]:
    """All runs of twelve words, or the whole text if it is shorter."""
    words = text.lower().split()
    return {" ".join(words[start : start + RUN]) for start in range(max(len(words) - RUN, 0) + 1)}


def without(prompts: list[str], held_out: list[str]) -> list[str]:
    """The prompts that share no run of words with one that is held out."""
    held = set().union(*map(runs, held_out))
    return [prompt for prompt in prompts if not runs(prompt) & held]


def main() -> None:
    """Writes the prompts to standard output."""
    parser = ArgumentParser(
        description=__doc__, usage="%(prog)s --count N [--text FILE] [--also FILE…] [--without FILE…]"
    )
    parser.add_argument("--count", type=int, default=1600)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--also", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    args = parser.parse_args()
    dice = random.Random(0)
    found, held_out = (
        [prompt.text for file in files for prompt in pick_prompts(file, 1_000_000)]
        for files in (args.also, args.without)
    )
    found += [task.format(job) for task, job in product(entries(CODE), entries(JOBS))]
    found += [*sums(dice, 60), *(passages(dice, args.text) if args.text else ())]
    open_tasks = [task.format(subject) for task, subject in product(entries(TASKS), entries(SUBJECTS))]
    found += dice.sample(open_tasks, min(max(args.count - len(found), 0), len(open_tasks)))
    dice.shuffle(found)
    for prompt in without(found, held_out)[: args.count]:
        print(json.dumps({"prompt": prompt}))


if __name__ == "__main__":
    main()
