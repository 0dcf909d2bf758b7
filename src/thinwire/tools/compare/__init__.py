"""`thinwire compare`: one model trained under several strategies, side by side, over the same link.
`planning` imports the list of strategies.
"""
