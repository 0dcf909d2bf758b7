"""What goes wrong between machines, found before training, each with what to do."""
