"""What a configuration must satisfy beyond each field's own type."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import get_args

from serving.config.precision_rank import PRECISION_RANK
from serving.config.schema import ClassRule, Config, ModelConfig, ServerConfig, TierConfig, TierKind
from serving.errors import ConfigError

#: Kinds with 16-bit results, which a CPU emulates unless told otherwise.
_ROUNDED_KINDS = frozenset({"fp16", "bf16", "mixed", "autocast"})


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the known names when none is near."""
    names = sorted(known)
    match = get_close_matches(name, names, n=1, cutoff=0.5)
    if match:
        return f"; did you mean {match[0]!r}?"
    return f"; one of {', '.join(names)}" if names else ""


def check_config(config: Config) -> None:
    """Raise ConfigError, with the field's path, at the first contradiction."""
    _check_server(config.server)
    seen: dict[str, int] = {}
    for index, model in enumerate(config.models):
        path = f"models[{index}]"
        if model.name in seen:
            raise ConfigError(f"{model.name!r} is already models[{seen[model.name]}]", f"{path}.name")
        seen[model.name] = index
        check_model(model, path)


def _check_server(server: ServerConfig) -> None:
    if server.tls_certificate and not server.tls_key:
        raise ConfigError("needs its private key, server.tls_key", "server.tls_certificate")
    if server.tls_key and not server.tls_certificate:
        raise ConfigError(
            "is the key of a certificate, and there is no server.tls_certificate", "server.tls_key"
        )


def check_model(model: ModelConfig, path: str) -> None:
    """Raise ConfigError at the model's first contradiction."""
    if (model.inputs is None) != (model.outputs is None):
        raise ConfigError("inputs and outputs are declared together, or both by the source", path)
    if model.sha256 and not model.weights:
        raise ConfigError("is the hash of weights, and there is no weights file", f"{path}.sha256")
    _check_tensor_names(model, path)
    _check_device(model, path)
    for name in model.tiers:
        _check_tier(model, name, f"{path}.tiers.{name}")
    _check_routing(model, path)
    _check_thresholds(model, path)


def _check_thresholds(model: ModelConfig, path: str) -> None:
    if model.outputs is None:
        return  # The source declares them.
    known = [tensor.name for tensor in model.outputs]
    for name in model.divergence.thresholds:
        if name not in known:
            raise ConfigError(
                f"no output {name!r}{nearest(name, known)}", f"{path}.divergence.thresholds.{name}"
            )


def _check_tensor_names(model: ModelConfig, path: str) -> None:
    for field, tensors in (("inputs", model.inputs or ()), ("outputs", model.outputs or ())):
        names = [tensor.name for tensor in tensors]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(f"{name!r} is declared twice", f"{path}.{field}[{index}].name")


def _check_device(model: ModelConfig, path: str) -> None:
    """A card is rehearsed on the CPU: it contradicts a real device."""
    if model.card in {"auto", "ieee"}:
        return
    devices = {f"{path}.device": model.device}
    devices |= {f"{path}.tiers.{name}.device": tier.device or "auto" for name, tier in model.tiers.items()}
    for where, device in devices.items():
        if device in {"cuda", "npu"}:
            raise ConfigError(f"card: {model.card} is rehearsed on a CPU, not on {device}", where)


def _check_tier(model: ModelConfig, name: str, path: str) -> None:
    tier = model.tiers[name]
    kinds = get_args(TierKind)
    if tier.kind is None and name not in kinds:
        raise ConfigError(f"{name!r} names no precision; say kind: …{nearest(name, kinds)}", path)
    if tier.kind is not None and name in kinds and tier.kind != name:
        raise ConfigError(f"a tier named {name!r} of kind {tier.kind!r} would mislead callers", path)
    if tier.keep_fp32 is not None and model.kind(name) != "mixed":
        raise ConfigError("only a mixed tier keeps named modules FP32", f"{path}.keep_fp32")
    if tier.native and model.kind(name) not in _ROUNDED_KINDS:
        raise ConfigError(f"{model.kind(name)} has no 16-bit kernels to choose", f"{path}.native")
    _check_static_shapes(model, tier, path)


def _check_static_shapes(model: ModelConfig, tier: TierConfig, path: str) -> None:
    batching = tier.batching
    if batching.bucket_rows and batching.bucket_rows[-1] != batching.max_rows:
        raise ConfigError(f"the largest bucket is max_rows, {batching.max_rows}", f"{path}.batching.buckets")
    if not tier.graphs:
        return
    if not batching.buckets:
        raise ConfigError(
            "a graph is captured per bucket; say batching.buckets, as in auto", f"{path}.graphs"
        )
    if (tier.device or model.device) == "cpu" or model.card not in {"auto", "ieee"}:
        raise ConfigError("a CPU has no graphs", f"{path}.graphs")


def _check_routing(model: ModelConfig, path: str) -> None:
    for name, rule in model.classes.items():
        if name in model.tiers or name in get_args(TierKind):
            raise ConfigError(f"{name!r} names a tier; a class needs another name", f"{path}.classes.{name}")
        if rule.tier not in model.tiers:
            hint = nearest(rule.tier, model.tiers)
            raise ConfigError(f"no tier {rule.tier!r}{hint}", f"{path}.classes.{name}")
        _check_degradation(model, rule, f"{path}.classes.{name}.may_degrade_to")
    known = [*model.classes, *model.tiers]
    if model.default is not None and model.default not in known:
        raise ConfigError(
            f"no class or tier {model.default!r}{nearest(model.default, known)}", f"{path}.default"
        )


def _check_degradation(model: ModelConfig, rule: ClassRule, path: str) -> None:
    lower = rule.may_degrade_to
    if lower is None:
        return
    if lower not in model.tiers:
        raise ConfigError(f"no tier {lower!r}{nearest(lower, model.tiers)}", path)
    if PRECISION_RANK[model.kind(lower)] >= PRECISION_RANK[model.kind(rule.tier)]:
        raise ConfigError(f"{lower!r} is not less precise than {rule.tier!r}", path)


def ineffective(config: Config) -> list[str]:
    """Keys that were set and that this version reads without acting on them."""
    notes = []
    if "grpc_port" in config.server.model_fields_set:
        notes.append("server.grpc_port: gRPC is not served yet")
    return notes
