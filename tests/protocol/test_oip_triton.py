"""Bodies as Triton's own client writes and reads them."""

import numpy as np
import pytest
import tritonclient.http as triton

from serving.protocol.oip import OutputRequest, decode_infer, encode_infer
from serving.tensors import DTYPES, Signature, TensorSpec


def array_of(dtype: str) -> np.ndarray:
    """A small array, `[2, 3]`."""
    if dtype == "BYTES":
        return np.array([[b"a", b"", "é".encode()], [b"[", b'"', b","]], object)
    return np.array([[0, 1, 1], [1, 0, 1]], DTYPES[dtype])


CASES = [(dtype, binary) for dtype in DTYPES for binary in (True, False) if binary or dtype != "FP16"]


@pytest.mark.parametrize(("dtype", "binary"), CASES)
def test_requests(dtype: str, binary: bool) -> None:
    """Its builder's body decodes to the array that it was given."""
    array = array_of(dtype)
    tensor = triton.InferInput("x", [2, 3], dtype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    body, json_length = triton.InferenceServerClient.generate_request_body(
        [tensor], request_id="r", priority=3, timeout=5000, parameters={"precision": "critical"}
    )
    spec = TensorSpec("x", dtype, (-1, 3))
    request = decode_infer(body, json_length, Signature((spec,), (TensorSpec("y", "FP32", (-1, 2)),)))
    assert np.array_equal(request.inputs["x"], array)
    assert (request.id, request.rows) == ("r", 2)
    assert request.parameters["precision"] == "critical"
    assert request.parameters["timeout"] == 5000
    # The client wants every output in binary unless told otherwise.
    assert request.outputs == (OutputRequest("y", True),)


@pytest.mark.parametrize(("dtype", "binary"), CASES)
def test_replies(dtype: str, binary: bool) -> None:
    """Its parser reads what it asked for."""
    array = array_of(dtype)
    tensor = triton.InferInput("x", [2, 1], "FP32")
    tensor.set_data_from_numpy(np.zeros((2, 1), "<f4"))
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    body, json_length = triton.InferenceServerClient.generate_request_body([tensor], outputs=outputs)
    signature = Signature((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", dtype, (-1, 3)),))
    request = decode_infer(body, json_length, signature)

    headers, reply = encode_infer("m", "1", request, {"y": array}, {"precision_tier": "fp16"})
    length = dict(headers).get("inference-header-content-length")
    result = triton.InferenceServerClient.parse_response_body(
        reply, header_length=None if length is None else int(length)
    )
    got = result.as_numpy("y")
    if dtype == "BYTES" and not binary:
        got = np.array([[text.encode() for text in row] for row in got], object)
    assert np.array_equal(got, array)
    assert result.get_response()["parameters"] == {"precision_tier": "fp16"}
