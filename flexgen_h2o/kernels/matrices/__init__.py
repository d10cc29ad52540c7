"""How weight matrices lie in memory and on disk, and the products with them; a module for each layout."""
