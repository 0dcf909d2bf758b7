"""What the commands do: compare, run, probe, plan, simulate and doctor. Only `thinwire.cli` and the
names `plan` and `Plan` of `thinwire` import it; it imports what users do, and `layout`.
"""
