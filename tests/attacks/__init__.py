"""The attacks that the library has to stand, made at random moments on real ranks."""

from tests.attacks import cutting, parting, raising, resuming

ATTACKS = [*cutting.ATTACKS, *parting.ATTACKS, *resuming.ATTACKS, *raising.ATTACKS]
