"""Message formats: headers, positions, values.

Independent of methods and ranks. `compress` and all readers of messages import it.
"""
