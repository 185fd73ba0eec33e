"""Running a step on the devices and drawing tokens."""
