"""The modules that users build, and the process groups of those that synchronise."""
