"""Put this folder on the path (pytest does so for a conftest), so that tests in rooms find fake_decoder."""
