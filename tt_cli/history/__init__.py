"""The run's history in a database: schema, writer, reader."""
