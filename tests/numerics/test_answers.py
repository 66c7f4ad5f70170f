"""Whether an answer came again."""

import math

import numpy as np
import pytest

from serving.numerics.answers import REPEAT_TOLERANCE, relative_l2, repeats


def test_distance_is_relative_to_the_expected_answer() -> None:
    """Over all elements together; of other shapes there is none."""
    assert relative_l2(np.array([3.0, 4.4]), np.array([3.0, 4.0])) == pytest.approx(0.08)
    assert relative_l2(np.zeros(2), np.zeros(2)) == 0
    assert relative_l2(np.zeros(2), np.zeros(3)) == math.inf
    assert math.isnan(relative_l2(np.array([math.nan]), np.array([1.0])))


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0 + REPEAT_TOLERANCE], [1.0, 2.0], True),
        ([1.0, 2.1], [1.0, 2.0], False),
        ([math.inf, 2.0], [math.inf, 2.0], True),
        ([-math.inf, 2.0], [math.inf, 2.0], False),
        ([math.inf, 2.0], [65504.0, 2.0], False),
        ([65504.0, 2.0], [math.inf, 2.0], False),
        ([math.nan, 2.0], [math.nan, 2.0], True),
        ([0.0, 2.0], [math.nan, 2.0], False),
        ([math.nan, 2.0], [0.0, 2.0], False),
        ([1.0], [1.0, 1.0], False),
        ([], [], True),
    ],
)
def test_an_answer_that_came_again(found: list[float], expected: list[float], same: bool) -> None:
    """Up to rounding where it is finite, exactly where it is not."""
    assert repeats(np.array(found, np.float32), np.array(expected, np.float32)) is same


@pytest.mark.parametrize("dtype", ["?", "<i8"])
def test_answers_of_whole_numbers(dtype: str) -> None:
    """Class numbers and flags."""
    answer = np.array([1, 0, 1], dtype)
    assert repeats(answer, answer.copy())
    assert not repeats(answer, 1 - answer.astype(int))


def test_infinite_answers_are_near_nothing() -> None:
    """Not even one another; and nothing is warned of."""
    infinite = np.full((2, 3), -np.inf, np.float32)
    assert not relative_l2(infinite, infinite) <= REPEAT_TOLERANCE
