"""Models delivered as a file that holds their graph: `TorchScript` and `ExportedProgram`.

    source: serving.models.programs:TorchScript
    weights: model.ts
    inputs: …
    outputs: …

The file is traced, scripted or exported at FP32 and converted here, to each tier's precision:
traced at FP16 there would be no FP32 master weights. What a trace froze, such as a constant or an
explicit dtype, no conversion reaches; the operators of the converted program are watched all the
same, and a tier whose products they leave in FP32 is refused.

A TorchScript archive is read by torch's own reader, which knows tensors and TorchScript's types
alone, and runs in TorchScript's interpreter. An exported program is Python: reading it evaluates
its shape expressions and guards, and it may call any function of torch. So it is read only if its
hash is configured, and only if nothing in it needs to be unpickled.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from serving.errors import ConfigError, ModelError
from serving.models.loading import checked_file
from serving.models.resolve import examples_of
from serving.models.source import ModelSource
from serving.tensors import Tensors

if TYPE_CHECKING:
    import torch

#: What `torch.export.save` writes for a program of tensors alone.
_PLAIN_ENTRIES = re.compile(
    r"(models/[^/]+\.json|data/weights/(weight_\d+|[^/]+_config\.json)"
    r"|data/constants/(tensor_\d+|[^/]+_config\.json)|data/sample_inputs/[^/]+\.pt"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id))"
)


class ProgramFile(ModelSource):
    """A model that is a file. The configuration declares its signature, file and hash."""

    #: Set from the configuration before `build`.
    path: Path | None = None
    sha256: str | None = None

    def build(self) -> torch.nn.Module:
        """The program as a module.

        Raises:
            ConfigError: no file is configured, it has another hash, or is no such program.
        """
        if self.path is None:
            raise ConfigError("a program is its file; give it as weights", "weights")
        try:
            path = checked_file(self.path, self.sha256) if self.sha256 else self.path
            return self._load(path)
        except (OSError, ModelError) as error:
            raise ConfigError(str(error), "weights") from error

    def examples(self) -> Tensors:
        """Made from the signature."""
        return examples_of(self.signature)

    @abstractmethod
    def _load(self, path: Path) -> torch.nn.Module:
        """The module in the file."""


class TorchScript(ProgramFile):
    """A file of `torch.jit.save`, traced or scripted, not frozen."""

    def _load(self, path: Path) -> torch.nn.Module:
        import torch  # noqa: PLC0415  Gateways import this module and stay without torch.

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", DeprecationWarning)
            try:
                module: torch.nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"{path} is no TorchScript archive: {_first_line(error)}", "weights"
                ) from error
        if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
            raise ConfigError(
                f"{path} has no weights, or is frozen; save it without torch.jit.freeze", "weights"
            )
        return module


class ExportedProgram(ProgramFile):
    """A file of `torch.export.save`, with its hash in the configuration."""

    def _load(self, path: Path) -> torch.nn.Module:
        import torch  # noqa: PLC0415

        if self.sha256 is None:
            raise ConfigError("an exported program is code; give its sha256", "sha256")
        # Read once: what is looked at is what is loaded.
        archive = path.read_bytes()
        with warnings.catch_warnings():
            # torch's own, of its serialised tree specifications.
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            try:
                _refuse_pickles(archive)
                module = torch.export.unflatten(torch.export.load(io.BytesIO(archive)))
            except ConfigError:
                raise
            except Exception as error:  # torch raises many kinds on a bad archive
                raise ConfigError(
                    f"{path} is no exported program: {_first_line(error)}", "weights"
                ) from error
        return _as_plain_module(module)


def _refuse_pickles(archive: bytes) -> None:
    """Check that `torch.export.load` will find nothing to unpickle.

    Raises:
        ConfigError: there is something, or something unknown.
    """
    import torch  # noqa: PLC0415
    from torch.export.pt2_archive import PT2ArchiveReader  # noqa: PLC0415

    reader = PT2ArchiveReader(io.BytesIO(archive))
    names = reader.get_file_names()
    if strange := [name for name in names if not _PLAIN_ENTRIES.fullmatch(name)]:
        raise ConfigError(f"the program holds {strange[0]!r}, which would be unpickled or run", "weights")
    if len(set(names)) != len(names):
        raise ConfigError("two entries of the program have one name", "weights")
    for name in names:
        if name.endswith("_config.json"):
            entries = json.loads(reader.read_string(name))["config"]
            if pickled := [key for key, entry in entries.items() if entry["use_pickle"]]:
                raise ConfigError(f"the program's tensor {pickled[0]!r} is pickled", "weights")
        elif name.endswith(".pt"):
            # torch falls back to unpickling where this fails.
            torch.load(io.BytesIO(reader.read_bytes(name)), weights_only=True)


def _as_plain_module(module: torch.nn.Module) -> torch.nn.Module:
    """Make an unflattened program copyable, and its constants buffers that a conversion finds."""
    import torch  # noqa: PLC0415

    for submodule in module.modules():
        for node in getattr(getattr(submodule, "graph", None), "nodes", ()):
            node.meta.clear()  # Symbolic tensors, which cannot be copied.
        constants = {
            name: value for name, value in vars(submodule).items() if isinstance(value, torch.Tensor)
        }
        for name, constant in constants.items():
            delattr(submodule, name)
            submodule.register_buffer(name, constant, persistent=False)
    return module


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
