"""MiniLM: tokens, padding, meaning, and its distance between precisions."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from serving.errors import BadType
from serving.models.minilm import MAX_CHARACTERS, MAX_TOKENS, MiniLM
from serving.numerics.conversion import convert
from serving.numerics.devices import Device
from serving.numerics.precision import Kind, PrecisionSpec
from serving.tensors import Tensors


def texts(*rows: str | bytes) -> Tensors:
    """Request inputs of these rows."""
    encoded = [row.encode() if isinstance(row, str) else row for row in rows]
    return {"text": np.array(encoded, dtype=object)}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", [101, 102]),
        ("Hello, World!", [101, 7592, 1010, 2088, 999, 102]),
        ("This is a sentence.", [101, 2023, 2003, 1037, 6251, 1012, 102]),
        ("café naïve", [101, 7668, 15743, 102]),
        ("unaffable", [101, 14477, 20961, 3468, 102]),
        ("\x00 \t\n", [101, 102]),
    ],
)
def test_known_ids(minilm: MiniLM, text: str, ids: list[int]) -> None:
    """WordPiece of bert-base-uncased: lower case, accents stripped, [CLS] … [SEP]."""
    tensors = minilm.preprocess(texts(text))
    assert tensors["ids"].tolist() == [ids]
    assert tensors["mask"].tolist() == [[1] * len(ids)]
    assert tensors["ids"].dtype == tensors["mask"].dtype == np.int64


def test_rows_are_padded_to_the_longest(minilm: MiniLM) -> None:
    """Padding is id 0 and mask 0."""
    tensors = minilm.preprocess(texts("", "Hello"))
    assert tensors["ids"].tolist() == [[101, 102, 0], [101, 7592, 102]]
    assert tensors["mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_no_rows(minilm: MiniLM) -> None:
    """A request without rows has tensors without rows."""
    assert minilm.preprocess(texts())["ids"].shape[0] == 0


@pytest.mark.parametrize("text", ["word " * 20_000, "x" * 40_000, "東" * 40_000, "! " * 20_000])
def test_long_texts_are_truncated(minilm: MiniLM, text: str) -> None:
    """Cutting a long text first gives the ids of tokenising all of it."""
    ids = minilm.preprocess(texts(text))["ids"]
    assert ids.shape[1] <= MAX_TOKENS
    assert ids[0].tolist() == minilm._tokenizer.encode(text).ids


@pytest.mark.parametrize("text", ["a" * 20_000_000, "東" * 7_000_000, " " * 20_000_000, "!" * 5_000_000])
def test_a_huge_text_costs_no_more_than_what_counts_of_it(minilm: MiniLM, text: str) -> None:
    """Whatever it is made of: the cut comes before the tokenizer sees it."""
    seen: list[int] = []

    class Watched:
        def encode_batch(self, batch: list[str]) -> Any:
            seen.extend(len(each) for each in batch)
            return MiniLM()._tokenizer.encode_batch(batch)

    watched = MiniLM()
    watched.__dict__["_tokenizer"] = Watched()
    assert watched.preprocess(texts(text))["ids"].shape[1] <= MAX_TOKENS
    assert seen == [MAX_CHARACTERS]


def test_bad_utf8_names_the_row(minilm: MiniLM) -> None:
    """The message says which row and where in it."""
    with pytest.raises(BadType, match=r"row 1 of input 'text' is not UTF-8: .* at byte 2"):
        minilm.preprocess(texts("good", b"ab\xff"))


def test_row_that_is_no_bytes(minilm: MiniLM) -> None:
    """A number among the texts is refused."""
    with pytest.raises(BadType, match="row 0 of input 'text' is int"):
        minilm.preprocess({"text": np.array([1], dtype=object)})


def test_collate_pads_and_shares(minilm: MiniLM, encoder: nn.Module) -> None:
    """Requests of unequal lengths share a batch, and a row's embedding doesn't depend on its mates."""
    parts = [minilm.preprocess(texts("Hello")), minilm.preprocess(texts("", "A much longer sentence."))]
    assert minilm.batch_key(parts[0]) == minilm.batch_key(parts[1])
    batch = minilm.collate(parts)
    assert batch["ids"].shape == (3, parts[1]["ids"].shape[1])
    alone, together = (
        encoder(*(torch.from_numpy(array) for array in tensors.values())) for tensors in (parts[0], batch)
    )
    assert torch.allclose(alone[0], together[0], atol=1e-6)
    assert minilm.collate(parts[:1]) is parts[0]


def test_texts_of_like_length_share_a_batch(minilm: MiniLM) -> None:
    """Others do not: in no batch of long texts is more than a third padding."""
    keys = {n: minilm.batch_key({"ids": np.zeros((1, n), np.int64)}) for n in range(1, MAX_TOKENS + 1)}
    for key in set(keys.values()):
        lengths = [n for n, own in keys.items() if own == key]
        assert max(lengths) <= 16 or min(lengths) > max(lengths) * 2 / 3 - 1
    assert len(set(keys.values())) == 9


def test_tokenizing_from_threads(minilm: MiniLM) -> None:
    """Gateway threads share one tokenizer."""
    rows = [f"sentence number {n} " + "word " * n for n in range(64)]
    expected = [minilm.preprocess(texts(row))["ids"].tolist() for row in rows]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: minilm.preprocess(texts(row))["ids"].tolist(), rows))
    assert found == expected


def test_meaning(minilm: MiniLM, encoder: nn.Module, device: Device) -> None:
    """A paraphrase is nearer than an unrelated sentence; embeddings have length 1."""
    tier = convert(encoder, PrecisionSpec("fp32"), device)
    tensors = minilm.preprocess(
        texts("A man is eating food.", "Someone has a meal.", "The stock market fell sharply.")
    )
    y = tier(*device.to_device(list(tensors.values())))
    assert torch.allclose(y.norm(dim=-1), torch.ones(3), atol=1e-6)
    assert y[0] @ y[1] > 0.5
    assert y[0] @ y[2] < 0.2


@pytest.mark.parametrize(("kind", "limit"), [("fp16", 1e-2), ("mixed", 1e-2), ("bf16", 5e-2)])
def test_distance_to_fp32(
    minilm: MiniLM, encoder: nn.Module, device: Device, kind: Kind, limit: float
) -> None:
    """Emulated tiers differ from FP32, by as much as such arithmetic should."""
    inputs = device.to_device(list(minilm.preprocess(minilm.examples()).values()))
    reference = convert(encoder, PrecisionSpec("fp32"), device)(*inputs)
    tier = convert(encoder, PrecisionSpec(kind), device, inputs)
    distance = (tier(*inputs) - reference).norm(dim=-1) / reference.norm(dim=-1)
    assert distance.min() > 1e-5
    assert distance.max() < limit


def test_few_weights_underflow(minilm: MiniLM, encoder: nn.Module, device: Device) -> None:
    """A handful of 22.6 million weights become zero; none is infinite and nothing is kept for it."""
    tier = convert(encoder, PrecisionSpec("fp16"), device)
    assert tier.kept_fp32 == ()
    assert sum(loss.to_zero for loss in tier.weight_losses) == 15
    assert all(loss.to_inf == 0 and not loss.material for loss in tier.weight_losses)


def test_mixed_keeps_pooling_and_every_norm(minilm: MiniLM, encoder: nn.Module, device: Device) -> None:
    """13 layer normalisations and what follows the last of them."""
    inputs = device.to_device(list(minilm.preprocess(minilm.examples()).values()))
    kept = convert(encoder, PrecisionSpec("mixed"), device, inputs).kept_fp32
    assert sum(name.endswith("LayerNorm") for name in kept) == 13
    assert set(kept) >= {"pooling", "normalize"}


@pytest.mark.parametrize("module", ["minilm", "efficientnet", "echo"])
def test_sources_need_no_torch(module: str) -> None:
    """The gateway imports a source and preprocesses without torch."""
    code = (
        f"import sys, inspect, serving.models.{module} as m\n"
        "from serving.models.source import ModelSource\n"
        "source = next(c for _, c in inspect.getmembers(m, inspect.isclass)"
        " if issubclass(c, ModelSource) and c is not ModelSource)()\n"
        "source.preprocess(source.examples())\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
