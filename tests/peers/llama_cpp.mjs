// Greedy decoding by llama.cpp, timed: token ids in, token ids and seconds out.
// Knows nothing of tokenizers or chat templates: ids go to the model as they are.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const USAGE = "usage: node llama_cpp.mjs MODEL.gguf [IDS.jsonl] [--threads N] [--max-new-tokens N]";

/** The package as the current folder has it: nothing is installed beside this script. */
function importPackage() {
  const { resolve } = createRequire(join(process.cwd(), "_"));
  try {
    return import(pathToFileURL(resolve("node-llama-cpp")));
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
    throw new Error("no node-llama-cpp here: npm install --ignore-scripts node-llama-cpp");
  }
}

function count(text, name) {
  const value = Number(text);
  if (!Number.isInteger(value) || value < 1) throw new Error(`--${name} ${text}: not a count`);
  return value;
}

/** What to run: {file, prompts: [{id, ids}], threads, maxNewTokens}. */
function readArguments() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      threads: { type: "string", default: "2" },
      "max-new-tokens": { type: "string", default: "128" },
    },
  });
  if (positionals.length < 1 || positionals.length > 2) throw new Error(USAGE);
  const [file, source = 0] = positionals; // 0 is stdin
  const lines = readFileSync(source, "utf8").split("\n").filter((line) => line.trim());
  if (!lines.length) throw new Error(`no prompts: give lines of {"id": ..., "ids": [...]}`);
  return {
    file,
    prompts: lines.map((line) => JSON.parse(line)),
    threads: count(values.threads, "threads"),
    maxNewTokens: count(values["max-new-tokens"], "max-new-tokens"),
  };
}

/** The library, and a sequence on `threads` CPU threads with room for `contextSize` tokens. */
async function load(file, threads, contextSize) {
  const { getLlama } = await importPackage();
  // maxThreads 0: the context's own count holds, it is not a hint.
  const llama = await getLlama({ gpu: false, build: "never", maxThreads: 0, logLevel: "error" });
  const model = await llama.loadModel({ modelPath: file });
  const context = await model.createContext({ contextSize, threads });
  return { llama, sequence: context.getSequence() };
}

/** Decodes one prompt on an empty KV cache, up to an end token (kept) or the limit. */
async function decode(sequence, ids, maxNewTokens) {
  await sequence.clearHistory();
  const tokens = [];
  const start = performance.now();
  let first = start;
  for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
    tokens.push(token);
    if (tokens.length === 1) first = performance.now();
    if (tokens.length === maxNewTokens || sequence.model.isEogToken(token)) break;
  }
  return {
    tokens,
    prefill_s: (first - start) / 1000, // up to the first token
    decode_s: (performance.now() - first) / 1000, // the tokens behind it
  };
}

async function main() {
  const { file, prompts, threads, maxNewTokens } = readArguments();
  const longest = Math.max(...prompts.map(({ ids }) => ids.length));
  const { llama, sequence } = await load(file, threads, longest + maxNewTokens);

  await decode(sequence, prompts[0].ids, maxNewTokens); // warm-up
  let counted = 0;
  let seconds = 0;
  for (const { id, ids } of prompts) {
    const run = await decode(sequence, ids, maxNewTokens);
    const behind = run.tokens.length - 1;
    const speed = behind ? behind / run.decode_s : null;
    console.log(JSON.stringify({ id, ...run, tokens_per_s: speed }));
    counted += behind;
    seconds += run.decode_s;
  }
  const total = counted ? (counted / seconds).toFixed(1) : "no";
  console.error(`decode: ${counted} tokens in ${seconds.toFixed(2)} s, ${total} tokens/s`);
  await llama.dispose();
}

main().catch((error) => {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
});
