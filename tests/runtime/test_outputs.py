"""What a module returned, in the order of its signature."""

from typing import Any

import numpy as np
import pytest
import torch

from serving.errors import ModelError
from serving.runtime.outputs import by_order, checked_output
from serving.tensors import TensorSpec

A, B = torch.zeros(2, 3), torch.ones(2, 3)
SPECS = [TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "FP32", (-1, 3))]


@pytest.mark.parametrize("returned", [(A, B), [A, B], {"b": B, "extra": None, "a": A}])
def test_outputs_stand_in_the_signatures_order(returned: Any) -> None:
    """By position, or by name."""
    first, second = by_order(returned, SPECS)
    assert (first is A, second is B) == (True, True)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (A, "returned 1 outputs; its signature has 2"),
        ((A, B, A), "returned 3 outputs"),
        ({"a": A}, "no tensor for output b"),
        ((A, None), "no tensor for output b"),
        (None, "returned NoneType, not tensors"),
    ],
)
def test_what_is_missing_is_named(returned: Any, words: str) -> None:
    """The model's fault, in a sentence."""
    with pytest.raises(ModelError, match=words):
        by_order(returned, SPECS)


def test_an_output_is_widened_and_never_narrowed() -> None:
    """To the signature's dtype; the rows are counted."""
    spec = TensorSpec("a", "FP64", (-1, 3))
    assert checked_output(spec, np.ones((2, 3), np.float32), 2).dtype == np.float64
    with pytest.raises(ModelError, match="its signature says FP32"):
        checked_output(SPECS[0], np.ones((2, 3), np.float64), 2)
    with pytest.raises(ModelError, match=r"shape \[2, 3\] for 4 rows"):
        checked_output(SPECS[0], np.ones((2, 3), np.float32), 4)
