"""`ModelSource`: how a model reaches Halftone.

A plain callable that returns an FP32 `torch.nn.Module` is enough for a model whose
inputs arrive ready to use; it needs no import of Halftone. Subclass `ModelSource` when
the model also wants preprocessing on the gateway (tokenising, decoding images), rows
of unequal length in one batch, or its own signature and examples.

The gateway imports a source for its preprocessing: keep `import torch` inside `build`,
and the gateway stays without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from serving.tensors import Signature, Tensors

if TYPE_CHECKING:
    import torch


class ModelSource(ABC):
    """A model with its signature, preprocessing and examples.

    One instance is made per process with no arguments. `preprocess` runs on a gateway's worker
    threads; `batch_key` and `collate` run on its event loop, so they must be quick; `build` and
    the module run in a tier's process.
    """

    #: What requests send and get; used where the config declares no inputs and outputs.
    signature: Signature

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """The FP32 module in eval mode.

        Its `forward` takes the tensors that `preprocess` returns, positionally and in that
        order, and returns one tensor, a sequence of tensors in the order of the signature's
        outputs, or a mapping by output name. Every output has one row per input row.
        """

    def preprocess(self, inputs: Tensors) -> Tensors:
        """Request tensors, as in the signature -> model tensors, the same number of rows."""
        return inputs

    def collate(self, parts: Sequence[Tensors]) -> Tensors:
        """Model tensors of several requests -> one batch, rows in order.

        The default concatenates, and so needs equal shapes beyond the rows; `batch_key`
        keeps others apart. Override both to pad ragged rows into one batch.
        """
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def batch_key(self, tensors: Tensors) -> object:
        """Requests whose keys are equal may share a batch. Default: the shapes beyond rows."""
        return tuple(array.shape[1:] for array in tensors.values())

    @abstractmethod
    def examples(self) -> Tensors:
        """A few real request inputs: for warm-up, for the sample shown at start, for tests."""
