"""Clients that people have, unmodified: `tritonclient` over HTTP against the running server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as triton
from server_process import ServerProcess


@pytest.fixture
def triton_client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    """Triton's client, connected to the server."""
    connected = triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4)
    yield connected
    connected.close()


def echo_input(x: np.ndarray, binary: bool) -> triton.InferInput:
    """The echo model's input."""
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary)
    return tensor


def test_health_and_metadata(triton_client: triton.InferenceServerClient) -> None:
    """Everything a client asks before it infers."""
    assert triton_client.is_server_live()
    assert triton_client.is_server_ready()
    assert triton_client.is_model_ready("echo")
    assert triton_client.is_model_ready("echo", "1")
    assert not triton_client.is_model_ready("nobody")
    assert triton_client.get_server_metadata()["name"] == "halftone"
    assert triton_client.get_model_metadata("echo")["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 128]}
    ]
    assert triton_client.get_model_config("echo")["max_batch_size"] == 32
    states = {model["name"]: model["state"] for model in triton_client.get_model_repository_index()}
    assert states == dict.fromkeys(["text", "vision", "echo", "classifier"], "READY")


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(triton_client: triton.InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    """Binary and JSON, in and out; FP32 returns every bit."""
    x = np.random.default_rng(3).standard_normal((3, 128)).astype(np.float32)
    result = triton_client.infer(
        "echo",
        [echo_input(x, binary_in)],
        outputs=[triton.InferRequestedOutput("y", binary_data=binary_out)],
        headers={"X-Precision": "fp32"},
        request_id="triton-1",
    )
    assert np.array_equal(result.as_numpy("y"), x)
    assert result.get_response()["id"] == "triton-1"
    assert result.get_response()["parameters"]["precision_tier"] == "fp32"


def test_infer_without_named_outputs_by_parameter(triton_client: triton.InferenceServerClient) -> None:
    """All outputs when none is named; the precision as a request parameter."""
    x = np.ones((1, 128), np.float32) / 3
    result = triton_client.infer("echo", [echo_input(x, True)], parameters={"precision": "fp16"})
    assert np.array_equal(result.as_numpy("y"), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(triton_client: triton.InferenceServerClient, algorithm: str) -> None:
    """The client's own request compression."""
    x = np.ones((2, 128), np.float32)
    result = triton_client.infer("echo", [echo_input(x, True)], request_compression_algorithm=algorithm)
    assert np.array_equal(result.as_numpy("y"), x)


@pytest.mark.parametrize("binary", [True, False])
def test_text(triton_client: triton.InferenceServerClient, binary: bool) -> None:
    """BYTES in both forms, with characters beyond ASCII."""
    sentences = np.array(["Grüße aus Köln", "昇腾", ""], dtype=object)
    tensor = triton.InferInput("text", [3], "BYTES")
    tensor.set_data_from_numpy(sentences, binary_data=binary)
    embedding = triton_client.infer("text", [tensor]).as_numpy("embedding")
    assert embedding.shape == (3, 384)
    assert np.allclose(np.linalg.norm(embedding, axis=1), 1, atol=2e-3)


def test_concurrent_requests(triton_client: triton.InferenceServerClient) -> None:
    """The client's asynchronous calls."""
    inputs = [np.full((1, 128), n, np.float32) for n in range(20)]
    calls = [triton_client.async_infer("echo", [echo_input(x, True)]) for x in inputs]
    for x, call in zip(inputs, calls, strict=True):
        assert np.array_equal(call.get_result().as_numpy("y"), x)


def test_errors_reach_the_client(triton_client: triton.InferenceServerClient) -> None:
    """A refusal is the client's own exception, with our sentence."""
    with pytest.raises(triton.InferenceServerException, match="neither a tier nor a class"):
        triton_client.infer(
            "echo", [echo_input(np.ones((1, 128), np.float32), True)], headers={"X-Precision": "fp8"}
        )


def test_statistics_count(triton_client: triton.InferenceServerClient) -> None:
    """`/stats` counts rows and requests, over all gateways."""

    def counted() -> tuple[int, int]:
        stats = triton_client.get_inference_statistics("echo")["model_stats"][0]
        return stats["inference_count"], stats["inference_stats"]["success"]["count"]

    rows, requests = counted()
    triton_client.infer("echo", [echo_input(np.ones((5, 128), np.float32), True)])
    after = counted()
    # The other gateway's figures may still arrive, within its beat; this request's are there.
    assert after[0] >= rows + 5
    assert after[1] >= requests + 1
