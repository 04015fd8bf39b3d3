"""Tables, plots and pages from result records."""
