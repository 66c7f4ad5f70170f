"""The console page in a real browser, on a running server."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import client
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, ready_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None and os.environ.get("CI"):
    raise RuntimeError("Chromium is not installed, and CI must run the console's tests")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"
)

CONFIG = """
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {}, fp16: {}}
    classes: {standard: fp16}
    default: standard
    divergence: {sample: 1.0, min_samples: 20}
"""
BODY = client.infer_body("x", np.linspace(0.1, 1, 128, dtype=np.float32)[None])


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of its own: its figures are this module's."""
    with ready_server(tmp_path_factory.mktemp("console"), CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    with sync_playwright() as play:
        # The sandbox needs privileges that containers lack; only our own page is opened.
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console says: nothing, unless a test expects it."""
    return []


@pytest.fixture
def page(browser: Browser, complaints: list[str]) -> Iterator[Page]:
    """A page that listens to its own errors."""
    context = browser.new_context()
    opened = context.new_page()
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    context.close()


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait for something that the page does by itself."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen"
        time.sleep(0.2)


def opened(page: Page, server: ServerProcess) -> Page:
    """The console, with its tiers."""
    page.goto(f"http://{server.address[0]}:{server.address[1]}/")
    page.wait_for_selector("tr[data-tier=fp16]")
    return page


def counted(server: ServerProcess, tier: str) -> float:
    """Requests of a tier, by /metrics."""
    families = text_string_to_metric_families(server.call("GET", "/metrics").body.decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "halftone_requests_total" and sample.labels["tier"] == tier
    )


def test_it_loads_without_a_complaint_and_from_this_server_alone(
    echo: ServerProcess, page: Page, complaints: list[str]
) -> None:
    """No network beyond it, no error, no warning."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    opened(page, echo)
    assert page.inner_text("#status") in {"Ready.", "Asking the server …"}
    eventually(lambda: page.inner_text("#status") == "Ready.", "ready")
    own = f"http://{echo.address[0]}:{echo.address[1]}/"
    assert all(url.startswith((own, "data:")) for url in asked)
    assert complaints == []


def test_its_figures_are_those_of_the_metrics(echo: ServerProcess, page: Page) -> None:
    """Requests, the effective precision, the divergence."""
    for _ in range(30):
        assert echo.call("POST", "/v2/models/echo/infer", BODY, x_precision="fp16").status == 200
    opened(page, echo)
    cell = "tr[data-tier=fp16] .rate"

    def agrees() -> bool:
        return float(page.get_attribute(cell, "data-total") or 0) == counted(echo, "fp16") >= 30

    eventually(agrees, "the count of the metrics")
    assert "fp16-emulated" in page.inner_text("tr[data-tier=fp16]")
    assert "fp32-ieee" in page.inner_text("tr[data-tier=fp32]")
    known = json.loads(echo.call("GET", "/v2/models/echo/precision").body)
    eventually(lambda: "rel_l2" in page.inner_text("figure.divergence"), "the divergence")
    label = page.get_attribute("figure.divergence svg[role=img]", "aria-label") or ""
    assert label.startswith("fp16: p99 ")
    shown = float(label.rpartition(" ")[2])
    assert shown == pytest.approx(known["tiers"]["fp16"]["quantiles"]["rel_l2"], rel=0.15)


def test_refusals_are_listed(echo: ServerProcess, page: Page) -> None:
    """By reason."""
    assert echo.call("POST", "/v2/models/echo/infer", BODY, x_precision="nope").status == 400
    opened(page, echo)
    eventually(lambda: "bad_precision" in page.inner_text(".errors"), "the refusal")


def test_an_input_is_sent_at_every_precision(echo: ServerProcess, page: Page, complaints: list[str]) -> None:
    """With the keyboard alone; both answers and their difference are shown."""
    opened(page, echo)
    page.focus(".try summary")
    page.keyboard.press("Enter")
    eventually(lambda: page.input_value("textarea").startswith('{"inputs"'), "the example")
    page.focus(".try button")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answers tr[data-tier=fp16] td:nth-child(7)")
    fp32, fp16 = (page.inner_text(f".answers tr[data-tier={tier}]") for tier in ("fp32", "fp16"))
    assert "rel_l2=0," in fp32
    assert "200" in fp16
    assert "rel_l2=0.0002" in fp16
    assert fp16.rstrip().endswith("pass")
    assert complaints == []


def test_a_bad_input_is_told(echo: ServerProcess, page: Page) -> None:
    """In the server's own words; nothing of it is taken for markup."""
    opened(page, echo)
    page.click(".try summary")
    page.fill(
        "textarea", '{"inputs": [{"name": "<img src=x onerror=alert(1)>", "datatype": "FP32", "shape": [1]}]}'
    )
    page.click(".try button")
    page.wait_for_selector(".answers tr[data-tier=fp16]")
    assert "the model has no input '<img src=x" in page.inner_text(".answers")
    assert page.query_selector(".answers img") is None


def test_a_late_example_does_not_replace_what_is_typed(echo: ServerProcess, page: Page) -> None:
    """There is no typing before it has come."""
    held: list[Route] = []
    page.route("**/example", lambda route: held.append(route))  # noqa: PLW0108  It marks its handler.
    opened(page, echo)
    with page.expect_request("**/example"):
        page.click(".try summary")
    assert not page.is_editable("textarea")
    held[0].continue_()
    page.fill("textarea", "mine")  # Waits until it can be edited.
    page.click(".try button")
    page.wait_for_selector(".answers tr[data-tier=fp16]")
    assert page.input_value("textarea") == "mine"


def test_without_an_example_one_can_still_type(
    echo: ServerProcess, page: Page, complaints: list[str]
) -> None:
    """The field says why there is none."""
    page.route(
        "**/example", lambda route: route.fulfill(status=503, body='{"error": "fp32 is still loading"}')
    )
    opened(page, echo)
    page.click(".try summary")
    page.fill("textarea", "mine")
    assert page.get_attribute("textarea", "placeholder") == "fp32 is still loading"
    assert len(complaints) == 1
    assert "503" in complaints[0]


def test_it_fits_a_phone_in_the_dark(echo: ServerProcess, browser: Browser) -> None:
    """Wide tables scroll within the page."""
    context = browser.new_context(viewport={"width": 375, "height": 700}, color_scheme="dark")
    page = opened(context.new_page(), echo)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)"
    context.close()


def test_everything_has_a_name_for_screen_readers(echo: ServerProcess, page: Page) -> None:
    """Tables have headers, charts and regions a label, fields theirs."""
    opened(page, echo)
    eventually(lambda: page.query_selector("svg.spark") is not None, "a chart")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('[role=region], svg[role=img]')]
            .filter((one) => !one.getAttribute('aria-label')).map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    assert page.evaluate("[...document.querySelectorAll('table')].every((t) => t.querySelector('th[scope]'))")
    assert page.evaluate(
        "[...document.querySelectorAll('input, textarea')].every((field) => field.labels.length === 1)"
    )
    assert page.get_attribute("html", "lang") == "en"


def test_it_survives_a_restart_of_the_server(
    tmp_path: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It says that nobody answers, tries again, and goes on."""
    page = browser.new_context().new_page()
    with ready_server(tmp_path, CONFIG) as server:
        opened(page, server)
        eventually(lambda: page.inner_text("#status") == "Ready.", "ready")
        port = server.address[1]
    eventually(lambda: "trying again" in page.inner_text("#status"), "noticing that it is gone")
    with ready_server(tmp_path_factory.mktemp("again"), CONFIG, port=port):
        eventually(lambda: page.inner_text("#status") == "Ready.", "recovery", timeout_s=60)
    page.context.close()


def test_a_token_is_asked_for(tmp_path: Path, browser: Browser) -> None:
    """The page itself holds nothing; what it asks for needs the token."""
    tokens = tmp_path / "tokens"
    tokens.write_text("operator a-long-enough-token-1234\n")
    folder = tmp_path / "server"
    folder.mkdir()
    with ready_server(folder, f"server: {{tokens_file: {tokens}}}\n{CONFIG}") as server:
        page = browser.new_context().new_page()
        page.goto(f"http://{server.address[0]}:{server.address[1]}/")
        page.wait_for_selector("#token-form:not([hidden])")
        assert page.query_selector("tr[data-tier]") is None
        page.fill("#token", "a-long-enough-token-1234")
        page.click("#token-form button")
        page.wait_for_selector("tr[data-tier=fp16]")
        page.context.close()
