"""`thinwire compare`: train one model under several strategies over the same link."""
