"""The one node typed by layout, programs of them, and what makes a program valid."""
