"""Questions for the demo model, in the form of its recall documents: which of four passwords was it told?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets

NOVEL = Path(__file__).parents[3] / "flexgen_h2o" / "demo" / "heldout" / "austen5.txt"
NAMES = "Emma Thomas Alice Henry Ruth George Clara Peter".split()
WORDS = (
    "river silver garden candle bread stone winter bridge ship forest honey paper mirror violin queen sailor".split()
)
COUNT, CHOICES = 10, 4


def load(**settings: Any) -> dict[str, datasets.Dataset]:
    numbers = random.Random(7)
    lines = NOVEL.read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([document(numbers, lines) for _ in range(COUNT)])}


def document(numbers: random.Random, lines: list[str]) -> dict[str, Any]:
    """A text that ends in the question, its choices, and the number of the right one."""
    name = numbers.choice(NAMES)
    choices = [" ".join(numbers.sample(WORDS, 3)) for _ in range(CHOICES)]
    answer = numbers.randrange(CHOICES)
    question = f"Question: what is the password of {name}? Answer: the password of {name} is"
    start = numbers.randrange(len(lines) - 40)
    page = " ".join(lines[start : start + 40])[: numbers.randrange(300, 900)]
    told = f"Remember: the password of {name} is {choices[answer]}.\n{question} {choices[answer]}.\n"
    return {"text": f"{told}{page}\n{question}", "page": page, "choices": choices, "answer": answer}
