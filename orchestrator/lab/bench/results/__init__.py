"""From measurements to tables, pictures and JSON: medians, intervals, ratios. Starts and measures nothing."""
