"""The commands: compare, run, probe, plan, simulate and doctor."""
