"""One inference: a request for a model becomes rows of the tier that it declared, and a reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from serving.config import ServerConfig
from serving.errors import (
    BadHeader,
    BadPrecision,
    Deadline,
    ModelError,
    NonfiniteOutput,
    RequestError,
    UnsupportedMedia,
    quote,
)
from serving.gateway.coalescer import Coalescer
from serving.gateway.escalation import escalate
from serving.gateway.model import Lane, ServedModel
from serving.gateway.reply_facts import (
    decision_facts,
    escalation_facts,
    headers_of,
    tolerance_facts,
    verification_facts,
)
from serving.gateway.routes import VERSION
from serving.models.source import ModelSource
from serving.observe.metrics import OTHER, GatewayMetrics
from serving.observe.request_log import Trace, exemplar_of
from serving.protocol.compression import decompress
from serving.protocol.http import REQUEST_ID_HEADER, Headers, Request, Response
from serving.protocol.oip import InferRequest, decode_infer, encode_infer
from serving.routing.declaration import Tolerance, declared_precision, positive_number
from serving.routing.policy import Decision
from serving.tensors import Signature, Tensors, all_finite, size_bytes

#: Threads for a model's own preprocessing. It holds the GIL or computes; more would not help.
PREPROCESSING_THREADS = 2
_CONTENT_TYPES = frozenset({"", "application/json", "application/octet-stream"})
_US_PER_S = 1_000_000
_MAX_TIMEOUT_US = 2**63


@dataclass(slots=True)
class RequestContext:
    """What is known about a request so far: for its metrics, its log lines and its error."""

    request_id: str
    started_s: float
    #: The name of the token that it came with, where the server asks for one.
    caller: str | None = None
    model: str = OTHER
    lane: Lane | None = None
    #: Why this tier: `tier`, `class=NAME`, `escalated=CAUSE` and so on; empty until it is decided.
    reason: str = ""
    #: The caller's trace, if it sent one.
    trace: Trace | None = None
    #: Whether its line is in the log, and its id beside a bucket that counts it.
    is_sampled: bool = False

    @property
    def exemplar(self) -> dict[str, str] | None:
        """For the histograms that count a sampled request."""
        return exemplar_of(self.request_id, self.trace) if self.is_sampled else None


class Inference:
    """Answers inference requests. All methods run on one event loop."""

    def __init__(self, server: ServerConfig, models: Iterable[str], metrics: GatewayMetrics) -> None:
        """`models`: the names of all that are served."""
        self._server = server
        self._metrics = metrics
        # Threads of its own for each model: one that is slow delays no other.
        self._preprocessing = {
            name: ThreadPoolExecutor(PREPROCESSING_THREADS, f"preprocess-{name}") for name in models
        }

    async def answer(self, model: ServedModel, request: Request, context: RequestContext) -> Response:
        """Decode, route, compute, encode.

        Args:
            model: what the request's path names.
            request: as it came.
            context: learns the request's id and lane as soon as they are known.

        Raises:
            RequestError: the request is refused, or its answer cannot be had.
        """
        started_s = asyncio.get_running_loop().time()
        infer = decode_infer(
            self._plain_body(request),
            request.headers.once(_json_length),
            model.ready_signature(),
            max_rows=model.max_rows,
            allow_nonfinite=model.nonfinite_inputs,
            heads=model.heads,
        )
        if infer.id and request.headers.get(REQUEST_ID_HEADER) is None:
            context.request_id = infer.id
        declared = _declared(model, request.headers, infer.parameters)
        decision = _decide(model, declared, context.request_id)
        taken_bytes = size_bytes(infer.inputs)
        decision = _degraded_when_full(model, decision, infer.rows, taken_bytes)
        model.routed(decision).inc()
        lane = context.lane = model.lanes[decision.tier]
        context.reason = decision.reason
        lanes = [lane]
        if request.headers.once(_wants_verification):
            lanes.append(_reference_lane(model))
        deadline_s = started_s + self._timeout_s(request.headers, infer.parameters)
        tensors, answers = await self._compute(model, lanes, infer, taken_bytes, deadline_s)
        verified = answers[1] if len(answers) > 1 else None
        outputs, escalation = await escalate(model, lane, tensors, answers[0], deadline_s, verified=verified)
        facts = decision_facts(decision, lane.description.effective if lane.description else "")
        facts |= escalation_facts(escalation, decision)
        context.reason = str(facts["precision_reason"])
        if model.precision is not None:
            if isinstance(declared, Tolerance):
                facts |= tolerance_facts(model.precision, declared, decision)
            if len(answers) > 1:
                facts |= verification_facts(await model.precision.compare(decision.tier, outputs, answers[1]))
            # The tier's own answer: its overflows count against its budget.
            model.precision.offer(context.request_id, decision, tensors, answers[0])
        _check_finite(model.ready_signature(), infer, outputs)
        headers, body = encode_infer(model.name, VERSION, infer, outputs, facts)
        lane.metrics.answered.inc()
        lane.metrics.request_duration.observe(time.perf_counter() - context.started_s, context.exemplar)
        return Response(200, headers + headers_of(facts), body)

    def _plain_body(self, request: Request) -> bytes:
        encoding = request.headers.once(_encoding)
        if encoding is None:
            return request.body
        return decompress(request.body, encoding, self._server.max_body_bytes)

    def _timeout_s(self, headers: Headers, parameters: Mapping[str, object]) -> float:
        """The shortest of the server's limit, the header's seconds and OIP's microseconds."""
        timeouts_s = [self._server.request_timeout_s]
        timeout_s = headers.once(_header_timeout_s)
        if timeout_s is not None:
            timeouts_s.append(timeout_s)
        timeout_us = parameters.get("timeout")
        if timeout_us is not None:
            if not isinstance(timeout_us, int) or isinstance(timeout_us, bool) or timeout_us < 0:
                raise BadHeader("the parameter timeout is a whole number of microseconds")
            if timeout_us > 0:  # Triton's clients send 0 for none.
                # JSON's integers have no bound, a float's range has.
                timeouts_s.append(min(timeout_us, _MAX_TIMEOUT_US) / _US_PER_S)
        return min(timeouts_s)

    async def _compute(
        self,
        model: ServedModel,
        lanes: Sequence[Lane],
        infer: InferRequest,
        taken_bytes: int,
        deadline_s: float,
    ) -> tuple[Tensors, list[Tensors]]:
        """The model's tensors, and what each lane makes of them."""
        coalescers = [lane.ready_coalescer()[0] for lane in lanes]
        admitted: list[Coalescer] = []
        try:
            for coalescer in coalescers:
                coalescer.admit(infer.rows, taken_bytes)
                admitted.append(coalescer)
            tensors = await self._preprocess(model, infer.inputs, deadline_s)
        except BaseException:
            for coalescer in admitted:
                coalescer.release(infer.rows, taken_bytes)
            raise
        submitted = [
            coalescer.submit(tensors, infer.rows, deadline_s, admitted_bytes=taken_bytes)
            for coalescer in coalescers
        ]
        if len(submitted) == 1:
            return tensors, [await submitted[0]]
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(each) for each in submitted]
        try:
            return tensors, [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()  # Nothing to cancel unless the other one failed.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _preprocess(self, model: ServedModel, inputs: Tensors, deadline_s: float) -> Tensors:
        if not model.preprocesses or model.source is None:
            return inputs
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline_s):
                outcome = await loop.run_in_executor(
                    self._preprocessing[model.name], _preprocessed, model.source, inputs
                )
        except TimeoutError:
            raise Deadline("the request's time ran out while it was preprocessed") from None
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome


def _preprocessed(source: ModelSource, inputs: Tensors) -> Tensors | RequestError:
    """The source's `preprocess`, or what to tell the client. Runs on a worker thread.

    It is foreign code: SystemExit and StopIteration, raised through a future, would end the
    gateway or never arrive.
    """
    try:
        return source.preprocess(inputs)
    except RequestError as error:
        return error
    except BaseException as error:
        failed = ModelError("the model's preprocessing failed")
        failed.__cause__ = error
        return failed


def _declared(
    model: ServedModel, headers: Headers, parameters: Mapping[str, object]
) -> str | Tolerance | None:
    """What a request declares. Whatever is wrong with it, the refusal says what would be right."""
    parameter = parameters.get("precision")
    try:
        if parameter is None:
            return headers.once(_declared_in_headers)
        return declared_precision(headers.get_all("x-precision"), parameter)
    except BadPrecision as error:
        raise BadPrecision(f"{error}; valid: {model.table.valid}") from error


def _declared_in_headers(headers: Headers) -> str | Tolerance | None:
    return declared_precision(headers.get_all("x-precision"), None)


def _encoding(headers: Headers) -> str | None:
    """How the body is compressed, if it is, and of a type that is served."""
    content_type = (headers.only("content-type") or "").partition(";")[0].strip().lower()
    if content_type not in _CONTENT_TYPES:
        raise UnsupportedMedia(
            f"content type {quote(content_type)}; send application/json, or application/octet-stream "
            "with Inference-Header-Content-Length"
        )
    return headers.only("content-encoding")


def _header_timeout_s(headers: Headers) -> float | None:
    value = headers.only("x-request-timeout-seconds")
    if value is None:
        return None
    timeout_s = positive_number(value.strip())
    if timeout_s is None:
        raise BadHeader("X-Request-Timeout-Seconds is a number above zero")
    return timeout_s


def _decide(model: ServedModel, declared: str | Tolerance | None, request_id: str) -> Decision:
    precision = model.precision
    if isinstance(declared, Tolerance):
        if precision is None:
            raise BadPrecision("this model has no fp32 tier, so no divergence is measured; declare a tier")
        decision = precision.decide_tolerance(declared)
    else:
        decision = model.table.decide(declared)
        if precision is not None:
            decision = precision.within_budget(decision, request_id)
    return decision


def _degraded_when_full(model: ServedModel, decision: Decision, rows: int, size_bytes: int) -> Decision:
    """The decision, or the less precise tier's where its class allows it and its own tier cannot."""
    if decision.may_degrade_to is None or model.lanes[decision.tier].has_room(rows, size_bytes):
        return decision
    precision = model.precision
    lower = model.table.degraded(decision, precision.is_within_budget if precision else lambda _: True)
    if lower is None or not model.lanes[lower.tier].has_room(rows, size_bytes):
        return decision  # It is refused by its own tier, which says when to come back.
    return lower


def _wants_verification(headers: Headers) -> bool:
    value = headers.only("x-precision-verify")
    if value is None:
        return False
    if value.strip().lower() not in {"true", "false"}:
        raise BadPrecision(f"X-Precision-Verify is true or false, not {quote(value)}")
    return value.strip().lower() == "true"


def _reference_lane(model: ServedModel) -> Lane:
    if model.precision is None:
        raise BadPrecision("this model has no fp32 tier to verify against")
    return model.lanes[model.precision.reference]


def _check_finite(signature: Signature, infer: InferRequest, outputs: Tensors) -> None:
    """Refuse an answer with NaN or infinity, but where they are legitimate and can be said."""
    for name, array in outputs.items():
        if array.dtype.kind != "f" or all_finite(array):
            continue
        spec = signature.output(name)
        if spec is None or not spec.allow_nonfinite:
            raise NonfiniteOutput("the model's answer holds NaN or infinity for this input")
        if any(wanted.name == name and not wanted.binary for wanted in infer.outputs):
            raise NonfiniteOutput(
                f"output {quote(name)} holds NaN or infinity, which JSON cannot say; ask for it in binary"
            )


def _json_length(headers: Headers) -> int | None:
    value = headers.only("inference-header-content-length")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 19):  # noqa: PLR2004  Below 2^63.
        raise BadHeader("Inference-Header-Content-Length is a whole number of bytes")
    return int(value)
