"""What the routes of other chat APIs share: each is translated to a chat and back."""
