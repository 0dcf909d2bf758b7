"""Train one strategy or script on ranks of this machine, from start to result."""
