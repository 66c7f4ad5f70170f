"""An Ascend NPU as a device, through torch_npu 2.13.0.

It has not run on a card. torch_npu is imported only when the device is opened; importing this
module needs neither torch_npu nor CANN.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from serving.errors import ConfigError
from serving.numerics.capability import Family, has_fp32_cube, npu_family
from serving.numerics.devices.graphs import Recorder
from serving.numerics.devices.streamed import Stream, StreamedDevice
from serving.numerics.devices.threads import read_threads, set_threads

_KEEP = "must_keep_origin_dtype"
_ALLOW = "allow_fp32_to_fp16"
#: 910A, 310P and 310B have no infinities in FP16, whatever the environment says.
_SATURATING: frozenset[Family] = frozenset({"npu-910a", "npu-310p", "npu-310b"})
#: Where CANN documents captures: hicann/runtime, `aclmdlRICaptureBegin`. Elsewhere torch_npu
#: 2.13.0 does not refuse by itself, and on a 910A gives a graph no memory of its own.
_WITH_GRAPHS: frozenset[Family] = frozenset({"npu-910b", "npu-a3", "npu-950"})


class Npu(StreamedDevice):
    """The process's first visible NPU; `ASCEND_RT_VISIBLE_DEVICES` says which that is.

    Every option is process-wide and read when an operator is called. All are set before the
    device is initialised and read back as stored; what the card makes of them only the probe
    tells. Opening initialises the device, so it must happen in the process that computes, and
    not before a fork.

    Args:
        threads: cores that an operator on the host may use; at least 1.
        hf32: let FP32 products and convolutions run in HF32, for an `hf32` tier.
        fp16_cube: on a card without FP32 products (910A, 310P), let FP32 ones run in FP16.
            Without it such an operator fails there.

    Raises:
        ConfigError: torch_npu or the card is missing, the SoC is unknown, or an option does not
            read back as set.
    """

    kind: ClassVar[str] = "npu"

    def __init__(self, threads: int, *, hf32: bool = False, fp16_cube: bool = False) -> None:
        self._npu: Any = _torch_npu().npu
        _set_options(self._npu, precision_mode=_KEEP, cube_math_type=_math_type(hf32=hf32), hf32=hf32)
        if not self._npu.is_available():
            raise ConfigError("torch_npu sees no NPU; set device: cpu", "device")
        self._device = torch.device("npu", 0)
        self._npu.set_device(self._device)
        self._family = npu_family(self._npu.get_soc_version())
        if fp16_cube and not has_fp32_cube(self._family):
            _set_options(self._npu, precision_mode=_ALLOW, cube_math_type="USE_FP16", hf32=False)
        self._switches = MappingProxyType({**_read_options(self._npu), **set_threads(threads)})
        self._name = str(self._npu.get_device_name(0))
        self._own_stream = self._npu.Stream(device=self._device)

    @property
    def name(self) -> str:
        """The SoC's name, such as `Ascend910B1`."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """`npu:0`."""
        return self._device

    @property
    def switches(self) -> Mapping[str, str]:
        """Precision options as torch_npu stores them, and thread counts of the host."""
        return self._switches

    @property
    def family(self) -> Family:
        """By SoC version."""
        return self._family

    @property
    def saturates(self) -> bool:
        """By SoC; a 910B can be made to saturate too, which the probe finds."""
        return self._family in _SATURATING

    @property
    def has_graphs(self) -> bool:
        """By SoC: where CANN documents captures."""
        return self._family in _WITH_GRAPHS

    def read_switches(self) -> dict[str, str]:
        """Read again."""
        return {**_read_options(self._npu), **read_threads()}

    def memory_bytes(self) -> Mapping[str, int]:
        """`allocated` by tensors, `reserved` by torch, `free` and `total` of the card's memory."""
        free, total = self._npu.mem_get_info()
        return {
            "allocated": self._npu.memory_allocated(),
            "reserved": self._npu.memory_reserved(),
            "free": free,
            "total": total,
        }

    @property
    def _stream(self) -> Stream:
        stream: Stream = self._own_stream
        return stream

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._npu.set_device(self._device)
        with self._npu.stream(self._own_stream):
            yield

    def _recorder(self) -> Recorder:
        graph = self._npu.NPUGraph()
        # Other threads of the process never touch the card, and must not spoil the capture.
        context = self._npu.graph(graph, stream=self._own_stream, capture_error_mode="thread_local")
        return Recorder(graph, context)

    def _release_memory(self) -> None:
        self._npu.empty_cache()


def npu_present() -> bool:
    """Whether torch_npu is installed and the host has NPUs, without importing torch_npu.

    Importing it where CANN is absent raises, and changes torch where it doesn't.
    """
    return importlib.util.find_spec("torch_npu") is not None and any(Path("/dev").glob("davinci[0-9]*"))


def _torch_npu() -> Any:
    try:
        return importlib.import_module("torch_npu")
    except Exception as error:  # without CANN it raises whatever its loader raises
        raise ConfigError(f"torch_npu cannot be imported: {error}", "device") from error


def _math_type(*, hf32: bool) -> str:
    """The member of `CubeMathType` that overrides the other options for matrix products."""
    return "USE_HF32" if hf32 else "KEEP_DTYPE"


def _set_options(npu: Any, *, precision_mode: str, cube_math_type: str, hf32: bool) -> None:
    """Set what decides in which precision the matrix unit computes, and read it back.

    The internal format matters too, since other layouts sum in another order; and without
    `jit_compile=False` moving a module to an old card rounds the weights of 3-d convolutions.

    Raises:
        ConfigError: an option reads back otherwise.
    """
    npu.set_option({"ACL_PRECISION_MODE": precision_mode})
    npu.conv.allow_hf32 = hf32
    npu.matmul.allow_hf32 = hf32
    npu.matmul.cube_math_type = npu.CubeMathType[cube_math_type]
    npu.set_compile_mode(jit_compile=False)
    # Can be written but not read through the same name.
    npu.config.allow_internal_format = False
    wanted = {
        "ACL_PRECISION_MODE": precision_mode,
        "conv.allow_hf32": str(hf32),
        "matmul.allow_hf32": str(hf32),
        "matmul.cube_math_type": cube_math_type,
        "ALLOW_INTERNAL_FORMAT": "disable",
    }
    read = _read_stored(npu)
    wrong = [f"{name}={read[name]}" for name, value in wanted.items() if read[name] != value]
    if wrong:
        raise ConfigError(f"torch_npu does not take its precision options: {', '.join(wrong)}")


def _read_stored(npu: Any) -> dict[str, str]:
    """Options that can be read before the device is initialised."""
    return {
        "ACL_PRECISION_MODE": _option("ACL_PRECISION_MODE"),
        "conv.allow_hf32": str(npu.conv.allow_hf32),
        "matmul.allow_hf32": str(npu.matmul.allow_hf32),
        "matmul.cube_math_type": getattr(npu.matmul.cube_math_type, "name", "unset"),
        "ALLOW_INTERNAL_FORMAT": _option("ALLOW_INTERNAL_FORMAT"),
    }


def _read_options(npu: Any) -> dict[str, str]:
    """All options, once the device is initialised.

    Raises:
        ConfigError: operators would be compiled, which old cards do by default.
    """
    if not npu.is_jit_compile_false():
        raise ConfigError("torch_npu does not take set_compile_mode(jit_compile=False)")
    return {**_read_stored(npu), "jit_compile": "False"}


def _option(name: str) -> str:
    """An option as torch_npu stores it; `unset` if it never was set."""
    stored = _torch_npu()._C._npu_getOption(name)  # noqa: SLF001 - the only way to read these
    return stored.decode() if stored else "unset"
