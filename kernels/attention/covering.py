"""Few combinations of many options, so that every value of an option meets every value of every other one."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations

Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]
Combination = dict[str, Hashable]


def pairs(combination: Mapping[str, Hashable]) -> set[Pair]:
    """The pairs of (option, value) that a combination holds, in the order of its options.

    Args:
        combination: A value for each option.
    """
    return set(combinations(combination.items(), 2))


def every_pair(options: Mapping[str, Sequence[Hashable]]) -> set[Pair]:
    """All pairs that have to meet.

    Args:
        options: The values of each option.
    """
    return {
        ((first, a), (second, b))
        for first, second in combinations(options, 2)
        for a in options[first]
        for b in options[second]
    }


def covering(
    options: Mapping[str, Sequence[Hashable]], is_allowed: Callable[[Combination], bool] = lambda _: True
) -> list[Combination]:
    """Combinations that hold every pair, found greedily and the same each time.

    Each begins with the first pair that is missing. Every other option, the one with the most values first, then takes
    the value that brings the most missing pairs with those which are there; of equal ones that which was used least.

    Args:
        options: The values of each option, two options or more.
        is_allowed: Whether a combination, or a part of one, may stay. Every pair needs one in which it may.
    """
    missing = dict.fromkeys(sorted(every_pair(options), key=repr))
    used = {(option, value): 0 for option, values in options.items() for value in values}
    by_size = sorted(options, key=lambda option: -len(options[option]))
    found = []
    while missing:
        chosen = dict(next(iter(missing)))
        for option in by_size:
            if option in chosen:
                continue
            gains = {
                value: len(_new(options, {**chosen, option: value}, missing))
                for value in options[option]
                if is_allowed({**chosen, option: value})
            }
            chosen[option] = max(gains, key=lambda value: (gains[value], -used[option, value]))
        combination = {option: chosen[option] for option in options}
        for pair in pairs(combination):
            missing.pop(pair, None)
        for item in combination.items():
            used[item] += 1
        found.append(combination)
    return found


def _new(
    options: Mapping[str, Sequence[Hashable]], chosen: Mapping[str, Hashable], missing: Mapping[Pair, None]
) -> set[Pair]:
    """The missing pairs that a part of a combination holds."""
    in_order = {option: chosen[option] for option in options if option in chosen}
    return {pair for pair in pairs(in_order) if pair in missing}
