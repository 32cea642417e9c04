"""Found first on the path of every process of a node whose disk is recorded: starts the recorder, see power_recorder."""

import os

if "COMMITMQ_POWER_STORE" in os.environ:
    import power_recorder

    power_recorder.Recorder(os.environ["COMMITMQ_POWER_STORE"], os.environ["COMMITMQ_POWER_RECORD"]).install()
