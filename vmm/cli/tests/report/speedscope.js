// Gives standard input to the importer for `perf script` of speedscope's page, whose package is
// unpacked in the folder that is named, and prints what it takes from it: a thread a line, its
// name and its stacks from the sample's place outwards.
const fs = require('fs');
const path = require('path');
const vm = require('vm');

const folder = path.join(process.argv[2], 'dist', 'release');
const name = fs.readdirSync(folder).find(file => /^speedscope-\w+\.js$/.test(file));
const bundle = fs.readFileSync(path.join(folder, name), 'utf8');
const call = /=(\w+)\(\w+\);if\(\w+\)return console\.log\("Importing from linux perf script/;
const importer = call.exec(bundle);
if (!importer) {
  console.error(`${name} has no importer that is known here`);
  process.exit(3);
}
// The page's functions are there from its beginning on; the rest of it sets them up, and then
// fails to draw, for there is no page.
const source = bundle.replace('(()=>{', `(()=>{globalThis.read=text=>${importer[1]}(text);`);
const nothing = new Proxy(function () {}, {
  get: (_, key) => (key === Symbol.toPrimitive ? () => '' : nothing),
  set: () => true,
  apply: () => nothing,
  construct: () => nothing,
});
const quiet = { log() {}, warn() {}, error() {} };
const page = { console: quiet, window: nothing, document: nothing, navigator: nothing };
Object.assign(page, { location: nothing, localStorage: nothing, self: nothing, setTimeout() {} });
Object.assign(page, { URL, TextDecoder, TextEncoder, performance, requestAnimationFrame() {} });
vm.createContext(page);
process.on('unhandledRejection', () => {});
try {
  vm.runInContext(source, page);
} catch {
  // As above.
}
const text = fs.readFileSync(0, 'utf8');
const group = page.read({ splitLines: () => text.split('\n'), firstChunk: () => text });
for (const profile of group ? group.profiles : []) {
  const stacks = profile.samples.map(sample => {
    const frames = [];
    for (let node = sample; node.parent; node = node.parent) frames.push(node.frame.name);
    return frames;
  });
  console.log(JSON.stringify([profile.getName(), stacks]));
}
