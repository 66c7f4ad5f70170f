"""A BERT encoder (Devlin et al. 2019) for sentence embeddings, inference only.

Attribute names are those of the published checkpoints' state dicts.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WORDS = 30522
HIDDEN = 384
INNER = 1536
HEADS = 12
LAYERS = 6
POSITIONS = 512
SEGMENTS = 2
#: As in the checkpoint's configuration.
EPSILON = 1e-12


class Embeddings(nn.Module):
    """Word, position and segment embeddings, summed and normalised. One segment only."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(SEGMENTS, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPSILON)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [rows, tokens] -> [rows, tokens, hidden]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        segment = torch.zeros(1, dtype=torch.int64, device=ids.device)
        x = self.word_embeddings(ids) + self.token_type_embeddings(segment)
        return self.LayerNorm(x + self.position_embeddings(positions))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Scaled dot-product attention over all tokens of a row that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, attend: torch.Tensor) -> torch.Tensor:
        """X [rows, tokens, hidden], attend [rows, 1, 1, tokens] bool -> [rows, tokens, hidden]."""
        rows, tokens, _ = x.shape
        # query, key, value: [rows, heads, tokens, hidden / heads]
        query, key, value = (
            project(x).view(rows, tokens, HEADS, HIDDEN // HEADS).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=attend)
        return mixed.transpose(1, 2).reshape(rows, tokens, HIDDEN)


class Projection(nn.Module):
    """A linear map, added to what it came from, normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPSILON)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """X [rows, tokens, width], residual [rows, tokens, hidden] -> [rows, tokens, hidden]."""
        return self.LayerNorm(self.dense(x) + residual)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention and its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.self = SelfAttention()
        self.output = Projection(HIDDEN)

    def forward(self, x: torch.Tensor, attend: torch.Tensor) -> torch.Tensor:
        """As `SelfAttention.forward`."""
        return self.output(self.self(x, attend), x)  # type: ignore[no-any-return]


class Intermediate(nn.Module):
    """The widening half of the feed-forward network, with exact GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, tokens, hidden] -> [rows, tokens, inner]."""
        return functional.gelu(self.dense(x))


class Layer(nn.Module):
    """One transformer layer, normalised after each half."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.intermediate = Intermediate()
        self.output = Projection(INNER)

    def forward(self, x: torch.Tensor, attend: torch.Tensor) -> torch.Tensor:
        """As `SelfAttention.forward`."""
        x = self.attention(x, attend)
        return self.output(self.intermediate(x), x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The layers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, attend: torch.Tensor) -> torch.Tensor:
        """As `SelfAttention.forward`."""
        for layer in self.layer:
            x = layer(x, attend)
        return x


class MeanPooling(nn.Module):
    """The mean over the tokens of each row that are no padding."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """X [rows, tokens, hidden], mask [rows, tokens] -> [rows, hidden]."""
        counted = mask.unsqueeze(-1).to(x.dtype)
        return (x * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)


class UnitNormalize(nn.Module):
    """Scales each row to Euclidean length 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, hidden] -> [rows, hidden]."""
        return functional.normalize(x, dim=-1)


class SentenceEncoder(nn.Module):
    """Token ids -> unit-length sentence embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = Encoder()
        self.pooling = MeanPooling()
        self.normalize = UnitNormalize()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Ids, mask [rows, tokens] int64 -> [rows, hidden]. Each row has at least one token."""
        attend = mask.bool()[:, None, None, :]
        x = self.encoder(self.embeddings(ids), attend)
        return self.normalize(self.pooling(x, mask))  # type: ignore[no-any-return]
