"""Everything that a terminal shows: numbers in words, tables, one chart, the screens of `tt join` and `tt demo`."""
