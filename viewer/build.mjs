// Bundles the page into skyrl_train/report/page/{page.js,page.css}, where skyrl_train/report/viewer_page.py inlines it.
import { mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "../skyrl_train/report/page");
const packed = Object.keys(JSON.parse(readFileSync(join(here, "package.json"), "utf8")).dependencies);
const license = (name) => `${name}:\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}`;

const { outputFiles } = await build({
  absWorkingDir: here,
  entryPoints: { page: "src/main.tsx" },
  outdir: target,
  write: false,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "ascii",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  banner: { js: `/*! ${packed.map(license).join("\n\n")} */` }, // required by the licenses of the bundled libraries
  logLevel: "warning",
});

mkdirSync(target, { recursive: true });
for (const file of outputFiles) {
  const temporary = join(target, `.${basename(file.path)}.${process.pid}`);
  writeFileSync(temporary, file.contents);
  renameSync(temporary, file.path); // atomic, so that readers never see a partial file
}
