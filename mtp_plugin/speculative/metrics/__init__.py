"""What is counted of a run, and the alarms that follow from it."""
