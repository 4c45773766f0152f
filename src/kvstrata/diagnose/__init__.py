"""Why a policy loses what it loses: what is missed, what comes back, how restless it is, what confidence tells."""
