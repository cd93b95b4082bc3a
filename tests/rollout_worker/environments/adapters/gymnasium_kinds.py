"""Environments that gymnasium has none of: importing this registers them."""

import gymnasium
import numpy as np


class Echo(gymnasium.Env):
    """Takes texts, and observes the last one with its length."""

    def __init__(self):
        self.action_space = gymnasium.spaces.Text(5, charset="abc")
        self.observation_space = gymnasium.spaces.Dict(
            {
                "text": gymnasium.spaces.Text(5, min_length=0, charset="abc"),
                "share": gymnasium.spaces.Box(0, 1, (1,), np.float32),
            }
        )

    def _observed(self, text):
        return {"text": text, "share": np.array([len(text) / 3], np.float32).clip(0, 1)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observed(""), {}

    def step(self, action):
        return self._observed(action), 0.5, False, False, {}


gymnasium.register("Echo-v0", Echo, max_episode_steps=2)
