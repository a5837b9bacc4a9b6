// Messages drawn by slack-blocks-to-jsx. Standard input: {"title": blocks, …}; output: an HTML page.
// node render.mjs FOLDER THEME, where FOLDER has node_modules and THEME is light or dark.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, theme] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/package.json`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { createElement } = (await load("react")).default;
const { renderToStaticMarkup } = (await load("react-dom/server")).default;
const library = `${folder}/node_modules/slack-blocks-to-jsx/dist`;
const { Message } = await import(pathToFileURL(`${library}/index.mjs`));

const data = { users: [{ id: "U123ABC", name: "ada" }], channels: [], user_groups: [] };
// This library takes `verbatim: true` for "do not format"; Slack means "turn no plain words into links"
// (docs.slack.dev/reference/block-kit/composition-objects/text-object).
const formatted = (name, value) => (name === "verbatim" ? undefined : value);
const messages = Object.entries(JSON.parse(readFileSync(0, "utf8"), formatted)).map(([title, blocks]) =>
  createElement("section", { key: title, id: title },
    createElement(Message, { blocks, theme, data, name: "sysom", logo: "data:,", time: new Date(0) })));
const style = readFileSync(`${library}/style.css`, "utf8");
const page = `body { margin: 0; padding: 16px; background: ${theme === "dark" ? "#1a1d21" : "#fff"}; } section { max-width: 46rem; }`;
process.stdout.write(`<!doctype html><meta charset="utf-8"><style>${style}\n${page}</style>${renderToStaticMarkup(messages)}`);
