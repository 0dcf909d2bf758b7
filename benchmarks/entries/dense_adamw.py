"""dense AdamW."""

INSIDE = "adamw"
SOURCE = "the mean gradient in every step, as DDP"


def local(workers: int) -> None:
    return None
