"""dense Muon."""

INSIDE = "muon"
SOURCE = "the mean gradient in every step, as DDP"


def local(workers: int) -> None:
    return None
