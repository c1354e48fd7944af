// Reads the OpenAPI document of the server from standard input and writes its answers as TypeScript.

import { readFileSync } from "node:fs";
import { compile } from "json-schema-to-typescript";

const { schemas } = JSON.parse(readFileSync(0, "utf8")).components;
for (const { properties = {} } of Object.values(schemas)) for (const property of Object.values(properties)) delete property.title;
const root = { components: { schemas }, definitions: schemas, type: "object", additionalProperties: false };
const options = { bannerComment: "", ignoreMinAndMaxItems: true, unreachableDefinitions: true };
process.stdout.write(await compile(root, "Nothing", options));
