"""`python -m instep`: the command line. Leaves out everything else."""

from .cli import main

main()
