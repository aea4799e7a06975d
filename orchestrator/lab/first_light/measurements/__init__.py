"""What each stage measures, with the tools that exist: one module a stage. Knows no folder and no other stage."""
