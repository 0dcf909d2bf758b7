"""What wraps one training step: gradient merge, recompute, autocast."""
