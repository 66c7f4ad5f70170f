"""Where a replica listens, seen from the same host and from another."""

import pytest

from serving.channel.endpoint import (
    Endpoint,
    connected_ipc_socket,
    listening_ipc_socket,
    new_ipc_name,
    this_host,
)


def test_a_gateway_of_the_same_host_takes_the_unix_socket() -> None:
    """Another one takes TCP, where there is any."""
    local = Endpoint("m:fp32", "r1", "here", "name")
    remote = Endpoint("m:fp32", "r1", "here", "name", ("10.0.0.1", 4000))
    assert local.address("here") == remote.address("here") == "\0name"
    assert local.address("elsewhere") is None
    assert remote.address("elsewhere") == ("10.0.0.1", 4000)


def test_names_differ_and_this_host_does_not() -> None:
    """Within one machine."""
    assert new_ipc_name() != new_ipc_name()
    assert this_host() == this_host() != ""


def test_a_socket_that_nobody_holds_refuses() -> None:
    """And leaves no file: it goes with its process."""
    name = new_ipc_name()
    with listening_ipc_socket(name) as listening:
        listening.listen(1)
        connected_ipc_socket("\0" + name).close()
    with pytest.raises(ConnectionRefusedError):
        connected_ipc_socket("\0" + name)
