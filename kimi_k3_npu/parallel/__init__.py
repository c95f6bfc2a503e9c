"""How the network is spread over ranks."""
