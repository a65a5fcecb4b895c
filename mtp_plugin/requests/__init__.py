"""What a request may ask for, where it stands, and when it ends."""
