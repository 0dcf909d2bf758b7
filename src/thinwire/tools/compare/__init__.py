"""`thinwire compare`: train one model under several strategies over the same link.

`planning` imports the list of strategies.
"""
