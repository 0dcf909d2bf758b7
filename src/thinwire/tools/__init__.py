"""The commands: compare, run, probe, plan, simulate and doctor.

Only `thinwire.cli` and the names `plan` and `Plan` of `thinwire` import this package. It imports
the public interface of thinwire, and `layout`.
"""
