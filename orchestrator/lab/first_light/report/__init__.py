"""What the stages found: plain data, redacted, in a folder with a page. Runs no stage."""
