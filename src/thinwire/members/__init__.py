"""Members that come and go: where they meet, who is admitted, who takes part. `local`, `strategy`
and the command import it.
"""
