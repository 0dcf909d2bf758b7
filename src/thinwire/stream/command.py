"""`thinwire follow` and `thinwire versions`; bad input is reported before torch is loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.members.credentials import read_token

if TYPE_CHECKING:
    from thinwire.stream.follower import Version

EXAMPLES = """Examples:

thinwire follow s3://bucket/model --to model.safetensors

thinwire follow http://10.0.0.1:8000/model --to model.safetensors --once
"""


def follow(
    where: str,
    /,
    *,
    to: Path,
    once: bool = False,
    wait: float | None = None,
    poll: float = 1.0,
    patience: float = 60.0,
    token_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Write each new version of a model that tw.publish writes, until its publisher is closed.

    The file is replaced as a whole, so that a reader of it always finds one version.

    Args:
        where: Folder, or an address that fsspec knows, such as s3://bucket/model.
        to: Safetensors file to write.
        once: Write the newest version and end.
        wait: Seconds to wait for a first version; by default there is no wait.
        poll: Seconds between two looks for a new version.
        patience: Seconds without progress after which a read that fails is an error.
        token_file: Secret of the publisher.
        quiet: Print nothing.
    """
    if to.suffix != ".safetensors":
        raise ValueError(f"--to {to}: the file must end in .safetensors")
    if not to.parent.is_dir():
        raise ValueError(f"--to {to}: there is no folder {to.parent}")
    from thinwire.stream.follower import follow as open_stream

    if quiet:
        logging.getLogger("thinwire").setLevel(logging.ERROR)
    token = read_token(token_file) if token_file else None
    follower = open_stream(where, token=token, poll=poll, patience=patience)
    version = follower.latest(wait)
    _write(version, to, quiet=quiet)
    if once:
        return
    for version in follower:
        _write(version, to, quiet=quiet)


def versions(where: str, /, *, token_file: Path | None = None, patience: float = 60.0) -> None:
    """List the versions of a model that can be read, with the sizes of their files.

    Args:
        where: Folder, or an address that fsspec knows, such as s3://bucket/model.
        token_file: Secret of the publisher.
        patience: Seconds without progress after which a read that fails is an error.
    """
    from thinwire.stream.follower import follow as open_stream
    from thinwire.stream.follower import links_of

    token = read_token(token_file) if token_file else None
    follower = open_stream(where, token=token, patience=patience)
    newest = follower.look(None)
    if newest is None:
        raise ValueError(f"{where} has no version so far")
    bases = {number: f"{size:,}" for number, size, *_ in newest["bases"]}
    steps = {number: f"{size:,}" for number, (_, size) in links_of(newest).items() if size}
    print(f"{'version':>9}{'difference':>16}{'base':>16}  bytes of the latest")
    for number in range(newest["oldest"], newest["number"] + 1):
        print(f"{number:>9}{steps.get(number, '-'):>16}{bases.get(number, '-'):>16}")
    end = "; its publisher is closed" if newest["closed"] else ""
    print(f"newest: step {newest['step']}, digest {newest['digest'][:16]}{end}")


def _write(version: Version, to: Path, *, quiet: bool) -> None:
    from thinwire._files import replacing
    from thinwire.checkpoint.files import write_pieces
    from thinwire.checkpoint.tensor_file import pieces_of

    metadata = {"format": "pt", "thinwire_step": str(version.step), "digest": version.digest}
    with replacing(to) as aside:
        size = write_pieces(aside, pieces_of(version.state_dict(), metadata))
    if not quiet:
        print(f"version {version.number}, step {version.step}: {size:,} bytes in {to}", flush=True)
