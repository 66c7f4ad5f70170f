"""Responses that are ready together are written together, each once."""

import asyncio

import pytest

from serving.protocol.write_batch import WriteBatch


class Recorded:
    """A writer."""

    def __init__(self, events: list[str], name: str) -> None:
        self._events, self._name = events, name

    def flush(self) -> None:
        """Say so."""
        self._events.append(f"write {self._name}")


def test_what_is_ready_together_is_written_together() -> None:
    """After the last of it was made, in that order; what is ready later, later."""

    async def run() -> list[str]:
        events: list[str] = []
        batch = WriteBatch()
        gate = asyncio.Event()

        async def answer(name: str) -> None:
            await gate.wait()
            events.append(f"make {name}")
            batch.add(Recorded(events, name))

        answers = [asyncio.create_task(answer(name)) for name in "abc"]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*answers)
        await asyncio.sleep(0)
        batch.add(Recorded(events, "d"))
        await asyncio.sleep(0)
        return events

    assert asyncio.run(run()) == ["make a", "make b", "make c", "write a", "write b", "write c", "write d"]


def test_a_writer_that_adds_another_is_written_in_its_turn() -> None:
    """A response may follow on the one that was written."""

    async def run() -> list[str]:
        events: list[str] = []
        batch = WriteBatch()

        class Twice(Recorded):
            def flush(self) -> None:
                super().flush()
                batch.add(Recorded(events, "second"))

        batch.add(Twice(events, "first"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return events

    assert asyncio.run(run()) == ["write first", "write second"]


def test_a_writer_that_fails_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged."""

    class Broken:
        def flush(self) -> None:
            raise RuntimeError("closed already")

    async def run() -> list[str]:
        events: list[str] = []
        batch = WriteBatch()
        batch.add(Broken())
        batch.add(Recorded(events, "other"))
        await asyncio.sleep(0)
        return events

    assert asyncio.run(run()) == ["write other"]
    assert "closed already" in caplog.text
