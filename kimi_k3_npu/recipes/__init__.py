"""Launch recipes: the YAML files of recipes/, what they mean for the model, and the scripts they become."""
