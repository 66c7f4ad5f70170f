"""The configuration's types. Field names and defaults here are what operators write in YAML."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from serving.config.divergence import Divergence
from serving.config.section import NAME_PATTERN, Name, Section, TensorName
from serving.tensors import DTYPES, FREE, MAX_RANK, OutputKind, Signature, TensorSpec

TierKind = Literal["fp32", "tf32", "hf32", "layercast", "mixed", "autocast", "fp16", "bf16"]


class ServerConfig(Section):
    """Where the server listens and what it bounds."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=8001, ge=1, le=65535, description="Reserved; gRPC is not served yet.")
    gateways: int = Field(default=1, ge=1, le=64, description="Gateway processes sharing the port.")
    max_connections: int = Field(
        default=1024, ge=1, le=65_536, description="Open at a time, per gateway. Others are answered 503."
    )
    max_body_bytes: int = Field(default=67_108_864, ge=1024, le=2**31 - 1)
    max_held_bytes: int = Field(
        default=536_870_912,
        ge=1024,
        le=2**40,
        description="Of all bodies that a gateway holds. Requests with more are answered 503.",
    )
    body_timeout_s: float = Field(default=10.0, gt=0, le=600, description="For a body to arrive whole.")
    request_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="For an answer, when the request names no shorter time. A batch that computes for more "
        "than half of it counts as hung, and its replica is replaced.",
    )

    drain_timeout_s: float = Field(
        default=20.0, ge=0, le=600, description="For requests in flight when the server stops."
    )
    tokens_file: Path | None = Field(
        default=None, strict=False, description="Bearer tokens, a line each: `name token`."
    )
    allow_unauthenticated: bool = Field(default=False, description="Listen beyond loopback without tokens.")
    tls_certificate: Path | None = Field(
        default=None, strict=False, description="PEM, the server's own certificate first: HTTPS on the port."
    )
    tls_key: Path | None = Field(
        default=None, strict=False, description="Its private key, PEM, not encrypted."
    )
    log: Literal["text", "json"] = Field(
        default="text", description="Lines on stderr: for people, or one JSON object each."
    )

    @property
    def batch_limit_s(self) -> float:
        """For one batch on its device.

        A row may arrive when another batch has just begun: with batches that take longer than
        this, it would not be answered in time.
        """
        return self.request_timeout_s / 2

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _open_bind_is_deliberate(self) -> Self:
        if not (self.is_loopback or self.tokens_file or self.allow_unauthenticated):
            raise ValueError(
                f"listening on {self.host}, beyond loopback, needs tokens_file, or "
                "allow_unauthenticated: true if something in front of the server checks callers"
            )
        return self


class TensorConfig(Section):
    """One input or output, as clients see it."""

    name: TensorName
    allow_nonfinite: bool = Field(default=False, description="NaN and infinity are legitimate in it.")
    dtype: str = Field(json_schema_extra={"enum": [*sorted(DTYPES)]})
    shape: tuple[int, ...] = Field(strict=False, description="-1: rows (first), or free.")

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"unknown dtype {value!r}; one of {', '.join(sorted(DTYPES))}")
        return value

    @field_validator("shape")
    @classmethod
    def _rows_first(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not 1 <= len(value) <= MAX_RANK or value[0] != FREE:
            raise ValueError(f"the first dimension is the rows, written -1; 1 to {MAX_RANK} dimensions")
        if any(size != FREE and size < 1 for size in value):
            raise ValueError("a dimension is -1 (free) or at least 1")
        return value

    def spec(self) -> TensorSpec:
        """The tensor as the rest of Halftone knows it."""
        return TensorSpec(self.name, self.dtype, self.shape, allow_nonfinite=self.allow_nonfinite)


class InputConfig(TensorConfig):
    """One input."""


class OutputConfig(TensorConfig):
    """One output, and what it means."""

    kind: OutputKind | None = None

    def spec(self) -> TensorSpec:
        """The tensor as the rest of Halftone knows it."""
        return TensorSpec(self.name, self.dtype, self.shape, self.kind, self.allow_nonfinite)


class Batching(Section):
    """How rows of several requests become one batch."""

    max_rows: int = Field(default=32, ge=1, le=65536)
    max_wait_ms: float = Field(
        default=2.0, ge=0, le=1000, description="How long a busy tier's next batch waits to fill."
    )
    target_ms: float | None = Field(
        default=None,
        gt=0,
        le=600_000,
        description="For a row from arrival to answer: keeps batches small enough, by what they cost lately.",
    )
    buckets: Literal["auto"] | tuple[int, ...] | None = Field(
        default=None,
        description="Numbers of rows that batches are padded to, so that the device sees few shapes; "
        "auto: powers of two up to max_rows.",
    )

    @field_validator("buckets", mode="before")
    @classmethod
    def _ascending_rows(cls, value: object) -> object:
        if value is None or value == "auto":
            return value
        rows = list(value) if isinstance(value, list | tuple) else []
        if not rows or any(type(count) is not int or count < 1 for count in rows):
            raise ValueError("auto, or numbers of rows, as in [1, 4, 16, 32]")
        if rows != sorted(set(rows)):
            raise ValueError("the buckets ascend, each given once")
        return tuple(rows)

    @property
    def bucket_rows(self) -> tuple[int, ...]:
        """The buckets, ascending; none where batches are not padded."""
        if self.buckets == "auto":
            powers = (1 << power for power in range(self.max_rows.bit_length()))
            return (*(rows for rows in powers if rows < self.max_rows), self.max_rows)
        return self.buckets or ()


class TierConfig(Section):
    """One precision at which the model is served."""

    kind: TierKind | None = Field(default=None, description="Where the tier's name is not its kind.")
    replicas: int = Field(default=1, ge=1, le=1024)
    resources: dict[str, float] = Field(
        default_factory=dict, strict=False, description="Ray resources of one replica, as in {NPU: 1}."
    )
    device: Literal["auto", "cpu", "cuda", "npu"] | None = None
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of a replica; default: cores / replicas."
    )
    batching: Batching = Batching()
    max_queue_rows: int = Field(default=1024, ge=1, le=2**24)
    max_queue_bytes: int = Field(
        default=268_435_456, ge=1024, le=2**40, description="Of the requests that wait, as model tensors."
    )
    graphs: bool = Field(
        default=False,
        description="On a GPU or NPU: capture a graph per bucket and replay it. Has not run on either.",
    )
    native: bool = Field(
        default=False, description="On a CPU: torch's own 16-bit kernels, not the fast emulation."
    )
    accept_degraded: bool = Field(
        default=False,
        description="Where the device computes less precisely than the tier's name says: serve it all the "
        "same, and say in every reply what was measured. Otherwise the tier is refused.",
    )
    keep_fp32: tuple[str, ...] | None = Field(
        default=None, strict=False, description="mixed: modules that stay FP32."
    )
    on_weight_loss: Literal["keep_fp32", "refuse"] = Field(
        default="keep_fp32", description="When 16 bits cannot hold a module's weights."
    )

    @field_validator("resources")
    @classmethod
    def _positive_amounts(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if not amount > 0:
                raise ValueError(f"{name}: the amount of a resource is above zero")
        return value


class ClassRule(Section):
    """The tier that answers requests of a sensitivity class."""

    tier: Name
    may_degrade_to: Name | None = Field(
        default=None,
        description="A less precise tier, for requests of this class while its own is full or lost; "
        "the reply says so. Without it they are refused.",
    )


def _class_rule(value: object) -> object:
    """`bulk: fp16` is short for `bulk: {tier: fp16}`."""
    return {"tier": value} if isinstance(value, str) else value


def _tier_config(value: object) -> object:
    """`fp16:` with nothing behind it is a tier with every default."""
    return {} if value is None else value


class Guard(Section):
    """Which rows are computed again at the reference because 16 bits could not hold them."""

    mode: Literal["output", "deep", "off"] = Field(
        default="output", description="output: by the model's outputs; deep: by every operator's result too."
    )


SOURCE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


class ModelConfig(Section):
    """One model and the tiers that serve it."""

    name: Name
    source: str = Field(pattern=SOURCE_PATTERN, description="`package.module:callable`, or a ModelSource.")
    weights: Path | None = Field(default=None, strict=False, description="A safetensors file.")
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", description="Of the weights.")
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    card: Literal["auto", "ieee", "910a", "910b", "310p"] = Field(
        default="auto", description="A card to rehearse on the CPU; tiers with device: cpu do without it."
    )
    inputs: tuple[InputConfig, ...] | None = Field(default=None, strict=False, min_length=1)
    outputs: tuple[OutputConfig, ...] | None = Field(default=None, strict=False, min_length=1)
    tiers: dict[
        Name,
        Annotated[TierConfig, BeforeValidator(_tier_config, json_schema_input_type=TierConfig | None)],
    ] = Field(min_length=1)
    default: Name | None = Field(
        default=None, description="Class or tier of requests that declare none; the most precise tier."
    )
    classes: dict[
        Name,
        Annotated[ClassRule, BeforeValidator(_class_rule, json_schema_input_type=ClassRule | Name)],
    ] = Field(default_factory=dict)
    guard: Guard = Guard()
    divergence: Divergence = Divergence()

    def kind(self, tier: str) -> TierKind:
        """A tier's kind: as configured, or its name."""
        # A name that is no kind, without a kind beside it, is refused in checks.py.
        return cast("TierKind", self.tiers[tier].kind or tier)

    def declared_signature(self) -> Signature | None:
        """The signature that the configuration declares, or None: then the source declares it."""
        if self.inputs is None or self.outputs is None:
            return None
        return Signature(
            tuple(tensor.spec() for tensor in self.inputs), tuple(tensor.spec() for tensor in self.outputs)
        )


class Config(Section):
    """The whole file."""

    server: ServerConfig = ServerConfig()
    models: tuple[ModelConfig, ...] = Field(strict=False, min_length=1)

    def model(self, name: str) -> ModelConfig:
        """The model of that name; KeyError if there is none."""
        return next(model for model in self.models if model.name == name)


PATTERN_HINTS = {
    NAME_PATTERN: "a name has lower-case letters, digits, '.', '_' or '-', at most 63, and starts "
    "with a letter or digit",
    SOURCE_PATTERN: "written package.module:callable",
}


def is_name(text: str) -> bool:
    """Whether `text` can name a model, tier or class."""
    return re.fullmatch(NAME_PATTERN, text) is not None
