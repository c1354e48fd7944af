"""The run's web page: its answers, its server, the page itself. Knows a run's history through the `Source` protocol."""
