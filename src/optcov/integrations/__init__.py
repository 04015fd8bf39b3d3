"""optcov inside other libraries. Import what you use: `import optcov.integrations.diffusers`."""
