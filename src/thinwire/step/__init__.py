"""What wraps one training step: gradient merge, recompute, autocast. `strategy` imports it."""
