"""Results, the tables and pages made of them, and what is shown meanwhile."""
