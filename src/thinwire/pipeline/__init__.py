"""Stages of a model on different ranks, over torch.distributed.pipelining. `strategy` imports this
package.
"""
