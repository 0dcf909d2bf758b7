"""Steps of up to thousands of ranks, simulated without torch: seconds and bytes of exchanges."""
