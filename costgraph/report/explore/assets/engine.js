"use strict";
// A row is [monomial, coefficient, ...], a monomial [generator, exponent, ...], a generator a name or [function, row, ...].
// Numbers are doubles, or exact: pairs of BigInts, the lower one above 0; exactly what is no fraction throws.

const gcd = (a, b) => { while (b) [a, b] = [b, a % b]; return a < 0n ? -a : a; };
const ratio = (n, d) => {
  if (d === 0n) throw new RangeError("a division by zero");
  const k = d < 0n ? -gcd(n, d) : gcd(n, d);
  return k === 1n ? [n, d] : [n / k, d / k];
};
const floorOf = ([n, d]) => n / d - (n % d < 0n ? 1n : 0n);
const whole = ([n, d]) => { if (d !== 1n) throw new RangeError("no whole number"); return n; };
const toDouble = ([n, d]) => {
  const shift = BigInt(Math.max(0, d.toString(2).length - n.toString(2).length + 64));
  const scaled = (n << shift) / d;
  return Number(scaled) / 2 ** Number(shift);
};
const power = ([n, d], e) => {
  if (e < 0n) return power(ratio(d, n), -e);
  const bits = BigInt(n.toString(2).length) * e;
  if (bits > 1n << 18n) throw new RangeError("a power without end");
  return [n ** e, d ** e];
};

const EXACT = {
  read: c => { const [n, d] = String(c).split("/"); return ratio(BigInt(n), BigInt(d ?? 1)); },
  zero: [0n, 1n],
  plus: (a, b) => a[1] === 1n && b[1] === 1n ? [a[0] + b[0], 1n] : ratio(a[0] * b[1] + b[0] * a[1], a[1] * b[1]),
  times: (a, b) => a[1] === 1n && b[1] === 1n ? [a[0] * b[0], 1n] : ratio(a[0] * b[0], a[1] * b[1]),
  power: (a, e) => power(a, BigInt(e)),
  less: (a, b) => a[0] * b[1] < b[0] * a[1],
  floor: a => [floorOf(a), 1n],
  ceil: a => [-floorOf([-a[0], a[1]]), 1n],
  pow: (a, b) => power(a, whole(b)),
  log: () => { throw new RangeError("a logarithm"); },
};
const near = x => Math.abs(x - Math.round(x)) < 1e-9 ? Math.round(x) : x; // log(8)/log(2) is 3
const DOUBLE = {
  read: c => { const [n, d] = String(c).split("/"); return d === undefined ? Number(n) : toDouble([BigInt(n), BigInt(d)]); },
  zero: 0,
  plus: (a, b) => a + b,
  times: (a, b) => a * b,
  power: (a, e) => e === 1 ? a : a ** e,
  less: (a, b) => a < b,
  floor: a => Math.floor(near(a)),
  ceil: a => Math.ceil(near(a)),
  pow: (a, b) => a ** b,
  log: Math.log,
};

/** Formulas at one state of the sizes: each sum, product and function of them is worked out once. */
class Engine {
  constructor(tables) {
    this.tables = tables;
    const values = a => tables.rows.map(row => row.map((x, i) => i % 2 ? a.read(x) : x));
    this.rows = new Map([[DOUBLE, values(DOUBLE)], [EXACT, values(EXACT)]]);
    this.set({});
  }
  set(sizes) {
    this.sizes = sizes;
    this.seen = new Map([DOUBLE, EXACT].map(a => [a, { row: [], monomial: [], generator: [] }]));
  }
  /** A row as a double. */
  number(i) { return this.row(i, DOUBLE); }
  /** A row as [above, below], or null where it is no fraction. */
  exact(i) { try { return this.row(i, EXACT); } catch (error) { if (error instanceof RangeError) return null; throw error; } }
  row(i, a) {
    const kept = this.seen.get(a).row;
    if (kept[i] === undefined) {
      const row = this.rows.get(a)[i];
      let out = a.zero;
      for (let t = 0; t < row.length; t += 2) out = a.plus(out, a.times(row[t + 1], this.monomial(row[t], a)));
      kept[i] = out;
    }
    return kept[i];
  }
  monomial(i, a) {
    const kept = this.seen.get(a).monomial;
    if (kept[i] === undefined) {
      const m = this.tables.monomials[i];
      let out = a.read(1);
      for (let f = 0; f < m.length; f += 2) out = a.times(out, a.power(this.generator(m[f], a), m[f + 1]));
      kept[i] = out;
    }
    return kept[i];
  }
  generator(i, a) {
    const kept = this.seen.get(a).generator;
    if (kept[i] === undefined) {
      const g = this.tables.generators[i];
      kept[i] = typeof g === "string" ? a.read(this.sizes[g]) : this.apply(g[0], g.slice(1), a);
    }
    return kept[i];
  }
  apply(name, rows, a) {
    if (a === DOUBLE && (name === "floor" || name === "ceil")) { // of 49/7 the floor is 7, of 49*(1/7) in doubles 6
      const inside = this.exact(rows[0]);
      if (inside !== null) return Number(EXACT[name](inside)[0]);
    }
    const [first, ...rest] = rows.map(r => this.row(r, a));
    if (name === "max") return rest.reduce((x, y) => a.less(x, y) ? y : x, first);
    if (name === "min") return rest.reduce((x, y) => a.less(y, x) ? y : x, first);
    return a[name](first, ...rest);
  }
}

// -- what a page shows ---------------------------------------------------------------------------------------------

/** The case of a peak that holds: the first of the largest, compared exactly where doubles cannot tell. */
const holding = (engine, cases) => {
  const values = cases.map(c => engine.number(c[0]));
  const most = Math.max(...values);
  let best = -1;
  values.forEach((v, i) => {
    if (!(v >= most * (1 - 1e-9))) return;
    const [old, now] = [best < 0 ? null : engine.exact(cases[best][0]), engine.exact(cases[i][0])];
    if (best < 0 || (old && now ? EXACT.less(old, now) : values[best] < v)) best = i;
  });
  return best;
};

/** Seconds of each op on a device, as declared, and what bounds it; null where the device has no rate or link. */
const spent = (engine, view, device, at) => device.refused ? null : view.ops.map(op => {
  const flops = op.flops.reduce((sum, [, row]) => sum + engine.number(row), 0);
  const bytes = engine.number(op.bytes);
  const compute = op.flops.reduce((sum, [key, row]) => sum + engine.number(row) / device.rates[key], 0);
  const times = [["compute", compute]];
  if (op.link) times.push(["link", bytes / 2 / device.links[op.link]]);
  else times.push(["memory", bytes / device.bandwidth]);
  if (op.sent) times.push(typeof op.sent[at] === "string" ? ["link", NaN] : [op.sent[at][1], engine.number(op.sent[at][0])]);
  const [bound, seconds] = times.reduce((x, y) => y[1] > x[1] || Number.isNaN(y[1]) ? y : x);
  return { op, flops, bytes, seconds, bound };
});

/** Seconds that no run is below: the busiest unit, or the bytes that no fusion avoids. */
const least = (engine, view, device, at) => {
  const units = { memory: engine.number(view.totals.fused) / device.bandwidth };
  const add = (unit, seconds) => { units[unit] = (units[unit] ?? 0) + seconds; };
  for (const op of view.ops) {
    if (op.link) add("link", engine.number(op.bytes) / 2 / device.links[op.link]);
    if (op.sent) Object.entries(op.sent[at][2] ?? {}).forEach(([unit, row]) => add(unit, engine.number(row)));
    else for (const [key, row] of op.least ?? op.flops) add(device.least[key][0], engine.number(row) / device.least[key][1]);
  }
  return Math.max(...Object.values(units));
};

/** Seconds of one forward, one backward of runs of ranks [first, last, forward, backward]: `costgraph.analysis.passes`. */
const oneByOne = (runs, p, m, most) => {
  const times = [0, 1].map(back => Array.from({ length: p }, (_, r) => (runs.find(run => run[0] <= r && r <= run[1]) ?? runs[0])[2 + back]));
  const sums = times.map(row => row.reduce((all, t) => [...all, all[all.length - 1] + t], [0]));
  const over = (back, a, b) => sums[back][b + 1] - sums[back][a];
  const both = r => times[0][r] + times[1][r];
  const way = (a, s, back) => {
    const alone = over(back, 0, a) + (p - 1 - a) * most(times[back].slice(0, a + 1));
    return a < s ? alone + times[1 - back][a] + over(back, a, s) - (s - a + 1) * both(s) : alone + over(1 - back, s, a) - times[1 - back][s];
  };
  const ends = [...new Set(runs.flatMap(run => run.slice(0, 2)))];
  return most(ends.map(s => most(ends.map(a => way(a, s, 0))) + most(ends.map(a => way(a, s, 1))) + (m - p + s) * both(s)));
};

/** Seconds of a step of a pipeline, of the views of its kinds of stage: the sum that `costgraph.seconds` states. */
const pipelined = (engine, views, device, at) => {
  const { schedule, stages, micro_batches: micro } = views[0], p = engine.number(stages), m = engine.number(micro);
  const shares = views.map(view => {
    const share = { forward: 0, backward: 0, once: 0 };
    spent(engine, view, device, at).forEach((t, i) => { share[view.ops[i].when] += t.seconds; });
    return [share.forward / m, share.backward / m, share.once];
  });
  const most = values => values.reduce((x, y) => y > x || Number.isNaN(y) ? y : x, 0);
  const passes = shares.map(([forward, backward]) => forward + backward);
  const through = passes.reduce((sum, one, i) => sum + engine.number(views[i].alike) * one, 0);
  const send = most(views.flatMap(v => typeof v.sends[at] === "string" ? [NaN] : v.sends[at].map(row => engine.number(row))));
  const all = schedule === "gpipe", n = m + p - 1;
  const slowest = all ? most(shares.map(s => s[0])) + most(shares.map(s => s[1])) : most(passes);
  const runs = views.flatMap((v, i) => v.ranks.map(run => [...run.map(row => Math.round(engine.number(row))), ...shares[i]]));
  const waits = all ? 2 * (p - 1) : 2 * (n - Math.ceil(near(n / p)));
  const busy = all || m < 2 * p ? through + (m - 1) * slowest : oneByOne(runs, p, m, most);
  return busy + (waits ? waits * send : 0) + most(shares.map(s => s[2]));
};

/** Live bytes at each step, by role. */
const timeline = (engine, { lives, steps }) => {
  const roles = [...new Set([...lives.map(l => l[0]), ...(steps.some(s => s[3] !== null) ? ["workspace"] : [])])];
  const changes = Object.fromEntries(roles.map(r => [r, new Map()]));
  const change = (role, at, bytes) => changes[role].set(at, (changes[role].get(at) ?? 0) + bytes);
  for (const [role, row, born, dies] of lives) {
    change(role, born, engine.number(row));
    if (dies !== null) change(role, dies + 1, -engine.number(row));
  }
  return roles.map(role => {
    const due = [...changes[role].entries()].sort((a, b) => a[0] - b[0]);
    let live = 0, next = 0;
    return { role, bytes: steps.map(([at, , , workspace]) => {
      for (; next < due.length && due[next][0] <= at; next++) live += due[next][1];
      return live + (role === "workspace" && workspace !== null ? engine.number(workspace) : 0);
    }) };
  });
};

/** What is asked of sizes and not so. */
const violated = (engine, view) => [
  ...view.asked.filter(([row, low, isWhole, equal, strict]) => {
    const found = engine.exact(row) ?? [BigInt(Math.round(engine.number(row) * 2 ** 20)), 2n ** 20n];
    const [n, d] = found, floor = BigInt(low) * d;
    if (isWhole && d !== 1n) return true;
    return equal ? n !== floor : strict ? n <= floor : n < floor;
  }).map(asked => asked[5]),
  ...Object.entries(view.counts).filter(([name, low]) => engine.sizes[name] < low)
    .map(([name, low]) => `the formulas of live memory hold from ${name} = ${low} on`),
];

/** The object of a JSON text that was deflated and written in base 64. */
const unpacked = async text => {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text());
};

if (typeof module !== "undefined") module.exports = { Engine, holding, least, pipelined, spent, timeline, unpacked, violated };
