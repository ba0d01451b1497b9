"""Sends the code of a run to replicas on other machines: the workspace, the packages to install, and the bootstrap.

Read `package.py` first: it makes the package of a launch. `workspace.py` chooses and packs the user's files,
`requirements.py` and `script_header.py` find the packages to install, and `checkout.py` asks git for the commit.
`bootstrap.py` is the script that a container runs first. It fetches the package and installs what is missing, and
`install_progress.py` reports the progress of that.
"""
