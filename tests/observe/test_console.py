"""The console's files: fixed, of this package, and closed to other origins."""

import re

import pytest

from serving.observe.console import CONSOLE_FILES, SECURITY_HEADERS


def test_the_page_asks_for_no_other_files_than_there_are() -> None:
    """By links, scripts and imports."""
    text = "".join(file.body.decode() for file in CONSOLE_FILES.values())
    named = set(re.findall(r"[\"']/console/([^\"']+)[\"']", text))
    assert named == set(CONSOLE_FILES) - {"console.html"}


@pytest.mark.parametrize("name", CONSOLE_FILES)
def test_no_file_names_another_server(name: str) -> None:
    """But the namespace of SVG, which nobody asks for."""
    urls = re.findall(r"https?://[^\s\"'<>]+", CONSOLE_FILES[name].body.decode())
    assert set(urls) <= {"http://www.w3.org/2000/svg"}


def test_no_markup_is_made_from_strings() -> None:
    """A name or a message of the server could hold some."""
    for file in CONSOLE_FILES.values():
        assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.body)


def test_the_policy_allows_this_server_alone() -> None:
    """No inline code, no frames."""
    policy = dict(SECURITY_HEADERS)["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    html = CONSOLE_FILES["console.html"].body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", html)
