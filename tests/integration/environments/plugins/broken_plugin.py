raise RuntimeError("this plugin is broken")
