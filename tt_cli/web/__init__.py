"""The run's web page: its answers, its server, the page itself."""
