"""Settings of the property tests: the first example may have to wait for a compiler, so none has a
deadline."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
