"""How ranks come to agree on an update: what is exchanged, checked and voted on."""
