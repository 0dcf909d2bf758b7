"""Tables, pages and progress bars of the commands. `compare` and `planning` import it."""
