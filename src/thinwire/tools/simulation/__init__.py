"""Steps of up to thousands of ranks, in seconds and bytes, without torch; no command imports it."""
