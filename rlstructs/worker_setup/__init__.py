"""What workers do before their first request: settings, streams and the user's own function."""
