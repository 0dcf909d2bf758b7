"""`thinwire up`, `down` and `status`: one file starts a training on several machines."""
