"""Local updates: ranks train on their own and average now and then. `strategy` and `integrations`
import it.
"""
