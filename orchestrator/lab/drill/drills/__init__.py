"""The drills, a file for each process that fails: promises, faults, figures."""
