"""`python -m optcov` is the command line, as `accelerate launch -m optcov` needs it."""

from optcov.cli import main

main()
