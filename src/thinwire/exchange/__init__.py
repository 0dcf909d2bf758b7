"""How ranks come to agree on a mean gradient: what is exchanged, checked and voted on."""
