"""Read requests and write answers as OpenAI's HTTP objects, without a server."""
