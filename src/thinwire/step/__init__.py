"""Wrappers of one training step: gradient merge, recompute, autocast. `strategy` imports this
package.
"""
