"""Reading strategies of Paddle fleet."""
