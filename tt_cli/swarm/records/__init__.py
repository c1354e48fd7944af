"""Records that peers publish about themselves on the DHT: schema, validator, publisher, consensus."""
