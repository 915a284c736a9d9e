"""Is our engine fast? `instep bench` and `instep gate`: no speed is reported of an answer that was not checked."""
