"""The laboratory: one model trained under several strategies, side by side, over the same emulated
link.
"""
