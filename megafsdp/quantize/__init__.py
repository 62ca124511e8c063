"""How compute weights are made from main weights: recipes.

Read first: recipe.py.
"""
