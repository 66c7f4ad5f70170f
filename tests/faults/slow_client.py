"""Be the slow client, in each of four ways, and show after how long the server lets go.

Usage: python tests/faults/slow_client.py --port 8000 --model faulty

`head`: a byte of the request line a second. `body`: a byte of the body a second. `silent`: nothing at all.
`reader`: reads no answer. Meanwhile another client asks as usual; its slowest reply is shown too.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import socket
import sys
import threading
import time

GIVE_UP_AFTER_S = 60.0
WAYS = ("head", "body", "silent", "reader")


def main() -> int:
    """Be slow. Returns 0 when the server let go of every connection and answered everybody else."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", required=True, help="whose example the other client asks for")
    options = parser.parse_args()
    ways = options.ways or WAYS
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no such way: {', '.join(sorted(unknown))}")
    status, example = ask(options.port, "GET", f"/v2/models/{options.model}/example")
    if status != 200:
        print(example.decode(), file=sys.stderr)
        return 2
    path = f"/v2/models/{options.model}/infer"
    held_s: dict[str, float] = {}
    threads = [
        threading.Thread(target=be_slow, args=(way, options.port, path, example, held_s)) for way in ways
    ]
    for thread in threads:
        thread.start()
    statuses, slowest_s = set(), 0.0
    while any(thread.is_alive() for thread in threads):
        began_s = time.monotonic()
        statuses.add(ask(options.port, "POST", path, example)[0])
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    for way in ways:
        let_go = f"let go after {held_s[way]:.1f} s" if way in held_s else "NOT let go"
        print(f"{way}: {let_go}")
    print(f"the other client: statuses {sorted(statuses)}, slowest reply {slowest_s * 1e3:.0f} ms")
    return 0 if len(held_s) == len(ways) and statuses == {200} else 1


def be_slow(way: str, port: int, path: str, body: bytes, held_s: dict[str, float]) -> None:
    """Until the server closes the connection, or patience has run out."""
    head = f"POST {path} HTTP/1.1\r\nhost: slow\r\ncontent-type: application/json\r\n"
    whole = f"{head}content-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(1.0)
        if way == "reader":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        began_s = time.monotonic()
        drips = iter(whole if way == "head" else body if way == "body" else b"")
        if way == "body":
            connection.sendall(whole)
        unsent = whole + body
        for second in itertools.count():
            if second > GIVE_UP_AFTER_S:
                return
            try:
                if way == "reader":
                    unsent = flood(connection, unsent, whole + body)
                    time.sleep(1.0)
                elif (drip := next(drips, None)) is not None:
                    connection.sendall(bytes([drip]))
                if way != "reader" and connection.recv(65_536) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        held_s[way] = time.monotonic() - began_s


def flood(connection: socket.socket, unsent: bytes, request: bytes) -> bytes:
    """Requests until no more fit, since nobody reads their answers; what is left of the last one."""
    connection.setblocking(False)
    try:
        while True:
            unsent = unsent[connection.send(unsent) :] or request
    except BlockingIOError:
        return unsent
    finally:
        connection.settimeout(1.0)


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body or None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
