"""An example of a plugin: an algorithm, a component and an environment for RL Lab."""
