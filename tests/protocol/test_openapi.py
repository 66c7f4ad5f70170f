"""The OpenAPI document."""

import json

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from serving.errors import RequestError
from serving.protocol.openapi import openapi_document
from serving.tensors import Signature, TensorSpec

MODELS = {
    "classifier": Signature(
        (TensorSpec("x", "FP32", (-1, 128)),), (TensorSpec("y", "FP32", (-1, 10), "logits"),)
    ),
    "encoder": Signature(
        (TensorSpec("tokens", "INT64", (-1, -1)),), (TensorSpec("e", "FP32", (-1, 384), "embedding"),)
    ),
}


@pytest.mark.parametrize("models", [{}, MODELS])
def test_the_document_is_valid(models: dict[str, Signature]) -> None:
    """OpenAPI 3.1, and plain JSON."""
    document = json.loads(json.dumps(openapi_document(models, "1.2.3")))
    OpenAPIV31SpecValidator(document).validate()
    assert document["info"]["version"] == "1.2.3"


def test_every_route_is_there() -> None:
    """With its method and nothing else."""
    paths = openapi_document(MODELS, "0")["paths"]
    assert {(path, method) for path, item in paths.items() for method in item if method != "parameters"} == {
        ("/v2", "get"),
        ("/v2/health/live", "get"),
        ("/v2/health/ready", "get"),
        ("/v2/models/{model}", "get"),
        ("/v2/models/{model}/ready", "get"),
        ("/v2/models/{model}/config", "get"),
        ("/v2/models/{model}/stats", "get"),
        ("/v2/models/{model}/example", "get"),
        ("/v2/models/{model}/precision", "get"),
        ("/v2/models/{model}/tiers/{tier}/trip", "post"),
        ("/v2/models/{model}/tiers/{tier}/reset", "post"),
        ("/v2/models/{model}/infer", "post"),
        ("/v2/repository/index", "post"),
        ("/metrics", "get"),
        ("/metrics/processes", "get"),
        ("/metrics/processes/{process}", "get"),
        ("/openapi.json", "get"),
    }


def test_infer_tells_every_error() -> None:
    """Each status and code of the error table that inference can answer."""
    responses = openapi_document(MODELS, "0")["paths"]["/v2/models/{model}/infer"]["post"]["responses"]
    elsewhere = {"unknown_route"}
    for error in RequestError.__subclasses__():
        if error.code not in elsewhere:
            response = responses[str(error.status)]
            assert f"`{error.code}`" in response["description"]
            assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}


def test_infer_tells_its_headers() -> None:
    """The precision contract is part of the interface."""
    infer = openapi_document(MODELS, "0")["paths"]["/v2/models/{model}/infer"]["post"]
    assert {"X-Precision", "X-Precision-Verify"} <= {parameter["name"] for parameter in infer["parameters"]}
    assert set(infer["responses"]["200"]["headers"]) == {
        "X-Request-Id",
        "X-Precision-Tier",
        "X-Precision-Effective",
        "X-Precision-Reason",
        "X-Precision-Measured",
        "X-Precision-Escalated-Rows",
        "X-Precision-Divergence",
        "X-Precision-Verdict",
    }


def test_an_operator_s_routes_tell_their_errors() -> None:
    """A tier without a reference, or with none of that name; a reason is optional."""
    paths = openapi_document(MODELS, "0")["paths"]
    for action in ("trip", "reset"):
        operation = paths[f"/v2/models/{{model}}/tiers/{{tier}}/{action}"]["post"]
        assert {"200", "400", "401", "404", "503"} <= set(operation["responses"])
        assert operation["requestBody"]["required"] is False


def test_the_measured_precision_is_described() -> None:
    """As `GET /v2/models/{m}/precision` answers it; what is not known is null."""
    operation = openapi_document(MODELS, "0")["paths"]["/v2/models/{model}/precision"]["get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    tier = schema["properties"]["tiers"]["additionalProperties"]
    assert tier["properties"]["state"]["enum"] == ["serving", "tripped", "probing"]
    document = {
        "model": "m",
        "reference": "fp32",
        "sample": 0.05,
        "budget": {"metric": "rel_l2", "limit": 5e-3, "quantile": 0.99, "window": 1000, "min_samples": 200},
        "floor": {"rel_l2": None},
        "tiers": {"fp16": {"state": "serving", "reason": "", "samples": 0, "bounds": {"rel_l2": None}}},
    }
    jsonschema.validate(document, schema)


def test_models_and_their_tensors() -> None:
    """Names are listed, free dimensions are free."""
    document = openapi_document(MODELS, "0")
    names = document["paths"]["/v2/models/{model}"]["parameters"][0]["schema"]["enum"]
    assert names == ["classifier", "encoder"]
    tensor = document["components"]["schemas"]["model.classifier"]["properties"]["inputs"]["prefixItems"][0]
    assert tensor["properties"]["shape"]["prefixItems"] == [{"type": "integer", "minimum": 1}, {"const": 128}]


def test_a_model_that_loads_is_named_before_its_signature_is_known() -> None:
    """Its routes answer 503 until then, and the document says so."""
    document = openapi_document({**MODELS, "slow": None}, "0", {"fp32", "fp16"})
    OpenAPIV31SpecValidator(document).validate()
    item = document["paths"]["/v2/models/{model}"]
    assert item["parameters"][0]["schema"]["enum"] == ["classifier", "encoder", "slow"]
    assert "503" in item["get"]["responses"]
    assert "model.slow" not in document["components"]["schemas"]
    trip = document["paths"]["/v2/models/{model}/tiers/{tier}/trip"]
    assert trip["parameters"][1]["schema"]["enum"] == ["fp16", "fp32"]


def test_every_route_tells_what_may_become_of_a_body() -> None:
    """Each request may carry one, even where none is wanted."""
    for item in openapi_document(MODELS, "0")["paths"].values():
        for method in {"get", "post"} & item.keys():
            assert {"400", "401", "405", "408", "413", "500"} <= item[method]["responses"].keys()
