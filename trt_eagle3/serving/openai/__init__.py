"""OpenAI's HTTP objects: requests read, answers written. No server in here."""
