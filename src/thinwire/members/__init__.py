"""Members that join and leave a run: meeting place, membership, transfer of state. `local`,
`strategy` and the command import it.
"""
