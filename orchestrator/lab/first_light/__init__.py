"""One run of everything that a new machine should be asked, and the folder with what it answered. Prints nothing."""
