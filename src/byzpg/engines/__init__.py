"""Other frameworks that run what byzpg is: thin, without a line of the method."""
