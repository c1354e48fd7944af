"""What is trained, behind one interface."""
