"""The exchange of gradients: agreements and their checks, sending, verification.

Imported by `optim` (for `DGCMomentum`), `local`, `members`, `amp` and `strategy`.
"""
