"""Echo gives back what it gets."""

import numpy as np
import torch

from serving.models.echo import Echo


def test_identity() -> None:
    """The network returns its input; the examples are fixed and fit the signature."""
    source = Echo()
    x = source.examples()["x"]
    assert source.signature.inputs[0].accepts(x.shape)
    assert np.array_equal(x, Echo().examples()["x"])
    assert torch.equal(source.build()(torch.from_numpy(x)), torch.from_numpy(x))
