"""The schemas of the interface's documents."""

from __future__ import annotations

import json

import jsonschema
import pytest

from serving.protocol import openapi_schemas as schemas
from serving.protocol.oip import decode_infer
from serving.tensors import DTYPES, Signature, TensorSpec

OUTPUT = (TensorSpec("y", "FP32", (-1, 2), "logits"),)
READ_ONLY = {
    "server": schemas.server_metadata_schema(),
    "ready": schemas.ready_schema("ready"),
    "repository": schemas.repository_schema(),
    "metadata": schemas.metadata_schema(),
    "configuration": schemas.configuration_schema(),
    "statistics": schemas.statistics_schema(),
    "precision": schemas.precision_schema(),
}


@pytest.mark.parametrize("schema", READ_ONLY.values(), ids=READ_ONLY)
def test_a_reply_s_schema_is_valid_and_refuses_an_empty_reply(schema: schemas.Json) -> None:
    """Each says what is always there."""
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate([], schemas.repository_schema())
    empty = [{}] if schema["type"] == "array" else {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(empty, schema)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_an_example_is_a_good_request(dtype: str) -> None:
    """The server decodes it; FP16 has none, since JSON cannot carry it."""
    signature = Signature((TensorSpec("a", dtype, (-1, 3, -1)), TensorSpec("b", "INT64", (-1,))), OUTPUT)
    examples = schemas.request_examples({"m": signature})
    if dtype == "FP16":
        assert examples == {}
        return
    body = json.dumps(examples["m"]["value"]).encode()
    assert decode_infer(body, None, signature).rows == 1
    protocol = schemas.protocol_schemas()
    document = {"components": {"schemas": protocol}, **schemas.reference_to("InferRequest")}
    jsonschema.validate(json.loads(body), document)


def test_an_example_of_many_elements_is_left_out() -> None:
    """An image would fill the document."""
    image = Signature((TensorSpec("image", "FP32", (-1, 3, 224, 224)),), OUTPUT)
    row = Signature((TensorSpec("x", "FP32", (-1, 1024)),), OUTPUT)
    assert list(schemas.request_examples({"image": image, "row": row})) == ["row"]
