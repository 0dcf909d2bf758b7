"""`thinwire plan`: the cost of a training step on a network, before it runs; without torch.
`simulation` imports its network.
"""
