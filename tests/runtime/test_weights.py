"""Master weights: what is refused before anything is loaded, and that nothing is executed."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from serving.errors import ConfigError
from serving.models.resolve import CallableSource
from serving.runtime.weights import build_module, load_weights
from serving.tensors import Signature, TensorSpec


class Two(nn.Module):
    """Two numbers in, three out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)


def source_of(build: Callable[[], Any]) -> CallableSource:
    """A plain callable's source."""
    signature = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 3)),))
    return CallableSource(build, signature, "a:b")


def test_a_module_is_built_the_same_in_every_process() -> None:
    """With the same random weights, in eval mode, without gradients."""
    first, second = (build_module(source_of(Two)) for _ in range(2))
    assert torch.equal(first.get_parameter("linear.weight"), second.get_parameter("linear.weight"))
    assert not first.training
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_a_module_that_is_not_fp32_is_refused() -> None:
    """There would be no master weights; the parameter is named."""
    with pytest.raises(ConfigError, match=r"parameter linear\.weight is float16"):
        build_module(source_of(lambda: Two().half()))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file for `Two`: ones."""
    path = tmp_path / "weights.safetensors"
    save_file({"linear.weight": torch.ones(3, 2), "linear.bias": torch.ones(3)}, path)
    return path


def sha256(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_weights_of_another_hash_are_refused(weights: Path) -> None:
    """And the found one is shown. Nothing is loaded."""
    module = Two()
    before = module.linear.weight.clone()
    with pytest.raises(ConfigError, match=f"SHA-256 {sha256(weights)}"):
        load_weights(module, weights, "0" * 64)
    assert torch.equal(module.linear.weight, before)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"linear.weight": torch.ones(3, 2)}, "Missing key"),
        (
            {
                "linear.weight": torch.ones(3, 2),
                "linear.bias": torch.ones(3),
                "head.weight": torch.ones(1),
            },
            "Unexpected key",
        ),
        ({"linear.weight": torch.ones(2, 3), "linear.bias": torch.ones(3)}, "size mismatch"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tensors: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    """Every parameter and buffer, no more, no less."""
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=words) as caught:
        load_weights(Two(), path, None)
    assert "does not fit the model" in str(caught.value)


@pytest.mark.parametrize("size", [0, 4, 7, 8, 60, -1])
def test_a_truncated_file_is_refused(size: int, weights: Path) -> None:
    """Wherever it ends."""
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ConfigError, match="not a valid safetensors file"):
        load_weights(Two(), weights, None)


def test_a_header_of_absurd_length_is_refused(weights: Path) -> None:
    """Before memory is taken for it."""
    weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
    with pytest.raises(ConfigError, match="not a valid safetensors file"):
        load_weights(Two(), weights, None)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """With and without a hash; a folder too."""
    for digest in (None, "0" * 64):
        with pytest.raises(ConfigError, match="cannot read"):
            load_weights(Two(), tmp_path / "gone.safetensors", digest)
        with pytest.raises(ConfigError, match=r"cannot read|not a valid"):
            load_weights(Two(), tmp_path, digest)


class Owned:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_is_never_executed(save: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    """Whatever its name says it is."""
    owned = tmp_path / "owned"
    path = tmp_path / "weights.safetensors"
    save({"linear.weight": Owned(owned)}, path)
    with pytest.raises(ConfigError, match="not a valid safetensors file"):
        load_weights(Two(), path, None)
    assert not owned.exists()
    # The control: under its true name, and loaded without care, it does harm.
    path = path.rename(tmp_path / "weights.pt")
    if save is torch.save:
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())  # noqa: S301  Our own.
    assert owned.exists()
