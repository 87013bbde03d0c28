"""Plans for batches that vary in size: one for each range of sizes, under the same budget."""
