"""The commands of experiments: `optcov table`, `optcov report` and `optcov bench`."""
