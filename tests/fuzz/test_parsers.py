"""Mutated requests through the parsers: refused with a reason, or read as anybody reads them."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import reference_inputs

from loadtests.fuzz.message import Message
from loadtests.fuzz.mutations import DECLARATION, mutated
from loadtests.fuzz.seeds import seeds
from loadtests.fuzz.typed_model import Typed
from serving.errors import BadPrecision, RequestError
from serving.models.echo import Echo
from serving.protocol.oip import HeadCache, InferRequest, decode_infer, encode_infer
from serving.routing.declaration import METRICS, Tolerance, declared_precision
from serving.tensors import Signature

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.http"))
SIGNATURES = {b"/v2/models/echo/infer": Echo.signature, b"/v2/models/typed/infer": Typed.signature}
#: Codes that only the parser gives.
PARSER_CODES = {"bad_json", "too_deep", "nonfinite_input", "bad_type", "bad_shape", "bad_tensor"}
MUTATIONS = 15_000


def length_of(message: Message) -> int | None:
    """Where the JSON ends; None where the header does not say so in digits."""
    told = message.header(b"inference-header-content-length")
    return int(told) if told is not None and told.isdigit() and len(told) < 20 else None


def decode(
    body: bytes, length: int | None, signature: Signature, heads: HeadCache | None
) -> InferRequest | tuple[type[RequestError], str]:
    """The request, or why there is none. Anything but a refusal with 400 or 413 is a fault."""
    try:
        return decode_infer(body, length, signature, max_rows=64, heads=heads)
    except RequestError as error:
        refusal = type(error), str(error)
    assert refusal[0].status in {400, 413}, refusal
    assert len(refusal[1].encode()) < 1000
    return refusal


def same(one: object, other: object) -> bool:
    """Whether two decodings agree."""
    if not (isinstance(one, InferRequest) and isinstance(other, InferRequest)):
        return one == other
    assert one.inputs.keys() == other.inputs.keys()
    arrays = all(np.array_equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
    return arrays and (one.id, one.rows, one.outputs) == (other.id, other.rows, other.outputs)


def check(message: Message, signature: Signature, heads: HeadCache) -> str:
    """The code of what becomes of it, once everything that must hold was seen to hold."""
    length = length_of(message)
    found = decode(message.body, length, signature, None)
    assert same(found, decode(message.body, length, signature, heads)), "a cached head means something else"
    assert same(found, decode(message.body, length, signature, heads)), "a cached head means something else"
    if not isinstance(found, InferRequest):
        return found[0].code
    expected = reference_inputs(message.body, length, signature)
    for spec in signature.inputs:
        array = found.inputs[spec.name]
        assert spec.accepts(array.shape)
        assert (array.dtype, array.shape[0]) == (spec.numpy_dtype, found.rows)
        assert np.array_equal(array, expected[spec.name])
    outputs = {spec.name: np.zeros((found.rows, 1), spec.numpy_dtype) for spec in signature.outputs}
    encode_infer("m", "1", found, outputs, {})
    return "ok"


def test_mutated_requests_are_read_as_anybody_reads_them_or_refused() -> None:
    """Accepted ones equal a plain decoding to the bit, with and without remembered heads."""
    beginnings = [message for message in seeds() if message.target in SIGNATURES]
    heads = {target: HeadCache() for target in SIGNATURES}
    codes: Counter[str] = Counter()
    for number in range(MUTATIONS):
        message = mutated(number, 0, beginnings).message
        if message is not None and message.target in SIGNATURES:
            codes[check(message, SIGNATURES[message.target], heads[message.target])] += 1
    # They do get everywhere.
    assert PARSER_CODES | {"ok", "bad_header", "too_large"} <= codes.keys(), codes
    assert codes["ok"] > MUTATIONS / 10


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.stem)
def test_the_corpus_is_parsed_as_before(entry: Path) -> None:
    """Its file's name says what becomes of it."""
    try:
        message = Message.parse(entry.read_bytes())
    except ValueError:
        return  # No head: the server's matter, and replayed there.
    encoded = {b"transfer-encoding", b"content-encoding"} & {name for name, _ in message.headers}
    if message.target not in SIGNATURES or encoded:
        return
    code = check(message, SIGNATURES[message.target], HeadCache())
    expected = entry.stem.partition("-")[0]
    if expected in PARSER_CODES | {"ok"}:
        assert code == expected


def test_the_corpus_is_there() -> None:
    """An empty folder would pass everything else."""
    assert len(CORPUS) >= 60
    assert {entry.stem.partition("-")[0] for entry in CORPUS} >= PARSER_CODES | {"ok", "bad_precision"}


#: The whole grammar of a tolerance, written anew.
TOLERANCE = re.compile(
    r"([a-z0-9_]+)[ \t]*<=[ \t]*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)", re.ASCII
)


def expected_declaration(text: str) -> str | Tolerance | None:
    """What `X-Precision: text` says; None: it is refused."""
    text = text.strip()
    first, sign, _ = text.partition("<")
    if not sign or len(first.split()) > 1:  # Not a metric, or the want of one, and a comparison.
        return text or None
    found = TOLERANCE.fullmatch(text)
    if found is None or found[1] not in METRICS:
        return None
    bound = float(found[2])
    return Tolerance(found[1], bound) if math.isfinite(bound) and bound > 0 else None


PIECES = st.sampled_from(
    [piece.decode("latin-1") for piece in DECLARATION] + ["\u0661", "\u3000", "\uff11", "."]
)
#: What Python's `float` takes, among other things.
NUMBERS = st.sampled_from(
    ["1", "1.", ".5", "+1", "1_0", "1e-3", "1E+3", "\u0661", "\uff11", "1e", "1 ", "0x1", "-1"]
)
TOLERANCES = st.tuples(
    st.sampled_from(["rel_l2", "max_abs", "rel-l2"]),
    st.sampled_from(["<=", " <= ", "<", "\u3000<="]),
    NUMBERS,
).map("".join)


@given(st.lists(PIECES, min_size=1, max_size=5).map("".join) | st.text(max_size=20) | TOLERANCES)
def test_the_grammar_of_a_declaration(text: str) -> None:
    """A name, a tolerance, or a refusal: as an independent reading of the grammar has it."""
    expected = expected_declaration(text)
    if expected is None:
        with pytest.raises(BadPrecision, match=r"(?s)^.{1,400}$"):
            declared_precision([text], None)
    else:
        assert declared_precision([text], None) == expected


@given(st.sampled_from(METRICS), st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_every_tolerance_can_be_said(metric: str, bound: float) -> None:
    """As Python, or JSON, writes the number."""
    assert declared_precision([f"{metric}<={bound!r}"], None) == Tolerance(metric, bound)
