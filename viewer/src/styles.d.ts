declare module "*.css"; // esbuild bundles them
