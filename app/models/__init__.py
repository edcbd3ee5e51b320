"""Networks by name: names.py knows them without torch, build.py makes one."""
