// A server of Kafka's protocol for a test: `embedlog serve` on an empty directory and a free port.
"use strict";

const { execFile, spawn } = require("node:child_process");
const { once } = require("node:events");
const { mkdtempSync, rmSync } = require("node:fs");
const { tmpdir } = require("node:os");
const { join } = require("node:path");
const { createInterface } = require("node:readline");
const { promisify } = require("node:util");

const run = promisify(execFile);

async function serve() {
  const directory = mkdtempSync(join(tmpdir(), "embedlog-"));
  const options = { stdio: ["ignore", "pipe", "inherit"] };
  const server = spawn("embedlog", ["serve", directory, "--listen", "127.0.0.1:0"], options);
  const stopped = once(server, "exit");
  // It prints a line as soon as clients can connect: "Serving ... at 127.0.0.1:40123".
  const lines = createInterface({ input: server.stdout });
  const [line] = await Promise.race([once(lines, "line"), stopped]);
  if (server.exitCode !== null) throw new Error(`embedlog serve ended with ${line}`);

  return {
    brokers: [line.split(" at ").pop()],

    // The records of a topic, read from the directory; with a count, waits until there are so many.
    async records(topic, count) {
      const waits = count ? ["--follow", "--from-beginning", "--max", `${count}`] : [];
      const command = ["consume", topic, "--root", directory, "--json", ...waits];
      const { stdout } = await run("embedlog", command, { timeout: 60_000 });
      return stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line));
    },

    async stop() {
      server.kill();
      await stopped;
      rmSync(directory, { recursive: true });
    },
  };
}

module.exports = { serve };
