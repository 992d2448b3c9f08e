"""``vllm-fl doctor``: what is wrong with this installation, why it matters, and what mends it.

Each check is a function of a module here, such as :mod:`vllm_fl.doctor.checks`. What runs
somebody else's code (an import of a plugin, a question to a backend) runs in a process of
its own with a time limit (:mod:`vllm_fl.doctor.probe_process`), so that a crash in there is
a finding.
"""
