"""`thinwire plan`: predict the cost of a training step on a network."""
