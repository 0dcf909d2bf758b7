"""Which of a process's connections lead to the store, beside all others that it may have."""

import socket

from tests.api import _connections_to


def test_pipes_between_processes_are_no_connections_to_the_store() -> None:
    """Processes of multiprocessing and workers that load data have such pipes."""
    near, far = socket.socketpair()
    with near, far, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            [found] = _connections_to(port)
            assert found.descriptor == connection.fileno()
