"""Live page of runs: who takes part, how far they are, who is slow and why, joins and deaths."""
