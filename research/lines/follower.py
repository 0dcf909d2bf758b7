"""Seconds until a follower has a version, over HTTP on an emulated line of 20 Mbit/s.

python -m research.lines.follower       # needs root, for network namespaces

The publisher and a web server of its folder are in one namespace, the follower in another one.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import thinwire as tw
from benchmarks.common import bare_parser, surroundings
from thinwire.tools.network.netns import Link, network

RESULTS = Path(__file__).with_suffix(".json")
NUMEL, PORT = 34_000_000, 8000
DEVIATIONS = (0.0, 2.4e-7, 6.6e-6, 4.5e-5)
"""Of the normal change before each version; the first is a base."""
_INSIDE = "from thinwire.tools.network.enter import enter_network; enter_network(int(argv[1])); "
_SERVE = f"import http.server as s; s.test(s.SimpleHTTPRequestHandler, port={PORT}, bind=argv[2])"
_FOLLOW = (
    "import time, torch, thinwire as tw; "
    f"model = {{'w': torch.zeros({NUMEL}, dtype=torch.bfloat16)}}; "
    "[print(version.number, time.time(), flush=True) "
    "for version in tw.follow(argv[2], model, poll=0.05)]"
)


@contextmanager
def _running(
    code: str, namespace: int, argument: str, folder: str
) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", f"from sys import argv; {_INSIDE}{code}"]
    process = subprocess.Popen(
        [*command, str(namespace), argument],
        pass_fds=[namespace],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(rate: str) -> list[dict[str, float]]:
    """Publish a version for each share of changed weights; return seconds until it was read."""
    found: list[dict[str, float]] = []
    torch.manual_seed(0)
    exact = 0.02 * torch.randn(NUMEL)
    weights = {"w": exact.bfloat16()}
    with ExitStack() as stack:
        net = stack.enter_context(network(2, Link.parse(rate)))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        publisher = tw.publish(folder, weights, every=1000)
        server, reader = net.namespace_fds
        stack.enter_context(_running(_SERVE, server, net.addresses[0], folder))
        address = f"http://{net.addresses[0]}:{PORT}"
        follower = stack.enter_context(_running(_FOLLOW, reader, address, folder))
        assert follower.stdout is not None
        for step, deviation in enumerate(DEVIATIONS):
            before = weights["w"].clone()
            weights["w"].copy_(exact.add_(torch.randn(NUMEL), alpha=deviation))
            begin_s = time.time()
            number = publisher.update(step)
            publisher.wait()
            published_s = time.time()
            read, read_s = follower.stdout.readline().split()
            assert int(read) == number
            [file] = Path(folder).glob(f"{number:09d}-*." + ("step" if step else "safetensors"))
            found.append(
                {
                    "changed": float((weights["w"] != before).float().mean()),
                    "megabytes": round(file.stat().st_size / 1e6, 3),
                    "publish_s": round(published_s - begin_s, 2),
                    "read_s": round(float(read_s) - published_s, 2),
                }
            )
    return found


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--link", default="20mbit")
    found = run(parser.parse_args().link)
    RESULTS.write_text(json.dumps({"versions": found, **surroundings(1)}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
