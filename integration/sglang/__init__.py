"""SGLang with the plugin on a GPU: engines in processes of their own, and their comparison."""
