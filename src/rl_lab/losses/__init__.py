"""Pure functions: returns, divergences, actor and critic losses."""
