"""Who runs when: everything interleaved, so that a machine that slows down slows all contenders alike. Pure."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeVar

C = TypeVar("C")


class Setting(NamedTuple):
    """What one comparison is made under; generations of one setting may be compared with one another."""

    repeat: int
    prompt: int
    """Index of the prompt."""
    temperature: float

    @property
    def seed(self) -> int:
        """Another one for every repeat and prompt, the same for every contender."""
        return self.repeat * 1_000 + self.prompt


def settings(repeats: int, prompts: int, temperatures: Sequence[float]) -> Iterator[Setting]:
    """Every prompt at every temperature, `repeats` times over; temperatures change fastest."""
    for repeat, prompt, temperature in product(range(repeats), range(prompts), temperatures):
        yield Setting(repeat, prompt, temperature)


def schedule(contenders: Sequence[C], order: Sequence[Setting]) -> Iterator[tuple[Setting, C]]:
    """Each contender once in every setting; who begins moves on by one from setting to setting."""
    for index, setting in enumerate(order):
        first = index % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            yield setting, contender
