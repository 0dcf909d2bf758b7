"""`thinwire doctor`: find network faults between machines before training."""
