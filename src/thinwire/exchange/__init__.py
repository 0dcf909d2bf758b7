"""One exchange of gradients: agreements and their checks, sending, verification. `optim` (for
`DGCMomentum`), `local`, `members`, `amp` and `strategy` import it.
"""
