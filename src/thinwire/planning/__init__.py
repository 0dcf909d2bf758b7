"""What a training step will cost on a network, before it runs; without torch."""
