"""Property tests have no deadline: the first example may have to wait for a compiler."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
