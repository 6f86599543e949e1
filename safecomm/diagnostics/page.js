"use strict";
// Draws each timeline on its canvas. The blocks are stacked in the order in which they were allocated, and the stack closes
// where one goes, so that its height is what is active at each moment. What is too small to draw at the zoom that is shown
// is the grey on top of it. All charts show the same part of their time, at the same scale of memory.
(async () => {
  const AREA = 0.7; // of a block that is drawn, in square pixels
  const BLOCKS = 6000, PIECES = 300000; // the most that are drawn at a time
  const MARGIN = { left: 70, right: 10, top: 10, bottom: 26 };
  const STROKES = { active: ["--ink", []], reserved: ["--soft", [2, 3]], unusable: ["--unusable", [6, 3]], arena: ["--accent", []] };
  const byId = (id) => document.getElementById(id);
  const timelines = JSON.parse(byId("data").textContent);

  const nice = (range, parts) => {
    const raw = range / parts, base = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((m) => m * base).find((m) => m >= raw * 0.999);
  };
  const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
  const bytes = (n) => {
    const [unit, name] = UNITS.find(([unit]) => n >= (unit === 2 ** 30 ? 10 * unit : unit)) ?? UNITS[4];
    return unit === 1 ? `${n} B` : `${(n / unit).toFixed(1)} ${name}`;
  };
  const time = (us) => us >= 1e6 ? `${(us / 1e6).toFixed(3)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(3)} ms` : `${us.toFixed(0)} µs`;

  // How many of the sorted values are less than x; with orEqual, less or equal.
  function before(values, x, orEqual = false) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (values[middle] < x || (orEqual && values[middle] === x)) low = middle + 1; else high = middle;
    }
    return low;
  }

  async function unpacked({ described, data }) {
    const packed = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const raw = await new Response(stream).arrayBuffer();
    const types = { B: Uint8Array, H: Uint16Array, I: Uint32Array, d: Float64Array };
    const columns = {};
    let place = 0;
    for (const [name, code, length] of described) {
      const size = types[code].BYTES_PER_ELEMENT * length;
      columns[name] = new types[code](raw.slice(place, place += size));
    }
    return columns;
  }

  // The blocks of a timeline, what they add up to at each moment, and what is drawn of them.
  class Blocks {
    constructor(columns) {
      const { held, waited, size } = columns;
      this.count = size.length;
      Object.assign(this, columns);
      this.start = new Float64Array(this.count);
      this.freed = new Float64Array(this.count).fill(Infinity);
      this.end = new Float64Array(this.count).fill(Infinity);
      let now = 0;
      for (let i = 0; i < this.count; i++) {
        this.start[i] = now += columns.start[i];
        const given = held[i] ? now + held[i] - 1 : now;
        if (held[i]) this.freed[i] = given;
        if (waited[i]) this.end[i] = given + waited[i] - 1;
      }
      this.addUp(size);
    }

    addUp(size) {
      const all = new Float64Array(3 * this.count);
      let length = 0;
      const waits = (i) => this.freed[i] < this.end[i];
      for (let i = 0; i < this.count; i++) {
        all[length++] = this.start[i];
        if (waits(i)) all[length++] = this.freed[i];
        if (this.end[i] < Infinity) all[length++] = this.end[i];
      }
      const sorted = all.subarray(0, length).sort();
      let unique = 0;
      for (const t of sorted) if (!unique || t !== sorted[unique - 1]) sorted[unique++] = t;
      this.times = sorted.slice(0, unique);
      this.active = new Float64Array(unique);
      this.unusable = new Float64Array(unique);
      for (let i = 0; i < this.count; i++) {
        this.active[before(this.times, this.start[i])] += size[i];
        if (waits(i)) this.unusable[before(this.times, this.freed[i])] += size[i];
        if (this.end[i] < Infinity) {
          const place = before(this.times, this.end[i]);
          this.active[place] -= size[i];
          if (waits(i)) this.unusable[place] -= size[i];
        }
      }
      for (let i = 1; i < unique; i++) {
        this.active[i] += this.active[i - 1];
        this.unusable[i] += this.unusable[i - 1];
      }
    }

    at(series, t) {
      const place = before(this.times, t, true) - 1;
      return place < 0 ? 0 : series[place];
    }

    // The numbers of the blocks that are large enough to be drawn, if from..to is that wide, and span bytes that high.
    chosen(from, to, span, width, height, most) {
      const scale = width * height / (to - from) / span;
      let numbers = [], areas = [];
      const last = before(this.start, to);
      for (let i = 0; i < last; i++) {
        if (this.end[i] <= from || this.end[i] <= this.start[i]) continue;
        const area = (Math.min(this.end[i], to) - Math.max(this.start[i], from)) * this.size[i] * scale;
        if (area >= AREA) { numbers.push(i); areas.push(area); }
      }
      if (numbers.length > most) {
        const least = Float64Array.from(areas).sort()[areas.length - most];
        numbers = numbers.filter((_, place) => areas[place] > least);
      }
      return numbers;
    }

    // What is drawn from..to: pieces of blocks, each at one height, and the band of the others on top of them.
    picture(from, to, span, width, height) {
      for (let most = BLOCKS; ; most >>= 1) {
        const drawn = this.stacked(this.chosen(from, to, span, width, height, most), from, to);
        if (drawn) return drawn;
      }
    }

    stacked(numbers, from, to) {
      const ends = numbers.slice().sort((a, b) => this.end[a] - this.end[b]);
      const block = [], start = [], end = [], bottom = [];
      const live = [], base = [], since = []; // from below: the blocks, and where each is since when
      const times = [from], tops = [0];
      let top = 0, gone = 0;
      const piece = (place, t) => {
        if (t <= since[place]) return;
        block.push(live[place]); start.push(since[place]); end.push(t); bottom.push(base[place]);
      };
      const note = (t) => {
        if (times[times.length - 1] === t) tops[tops.length - 1] = top;
        else { times.push(t); tops.push(top); }
      };
      const remove = (until) => {
        for (; gone < ends.length && this.end[ends[gone]] <= until; gone++) {
          const t = this.end[ends[gone]], size = this.size[ends[gone]], place = before(live, ends[gone]);
          for (let above = place; above < live.length; above++) {
            piece(above, t);
            base[above] -= size;
            since[above] = t;
          }
          for (const each of [live, base, since]) each.splice(place, 1);
          top -= size;
          note(t);
        }
      };
      for (const number of numbers) {
        const t = Math.max(this.start[number], from);
        remove(t);
        if (block.length > PIECES && numbers.length > 1) return null;
        live.push(number);
        base.push(top);
        since.push(t);
        top += this.size[number];
        note(t);
      }
      remove(to);
      if (block.length > PIECES && numbers.length > 1) return null;
      live.forEach((_, place) => piece(place, to));
      return { numbers, block, start, end, bottom, band: this.band(from, to, times, tops) };
    }

    band(from, to, drawnTimes, drawnTops) {
      const first = Math.max(before(this.times, from, true) - 1, 0), last = before(this.times, to);
      const times = [], bottoms = [], tops = [];
      let place = 0;
      for (let i = first; i < Math.max(last, first + 1); i++) {
        const t = Math.max(this.times[i], from);
        while (place + 1 < drawnTimes.length && drawnTimes[place + 1] <= t) place++;
        times.push(t); bottoms.push(drawnTops[place]); tops.push(this.active[i]);
      }
      return { times, bottoms, tops };
    }
  }

  // The value at each moment of what changes at points, and on it the bands below.
  function stackedBands(bands) {
    const times = [...new Set(bands.flatMap(([, , points]) => points.map((p) => p[0])))].sort((a, b) => a - b);
    let bottoms = times.map(() => 0);
    return bands.map(([name, colour, points]) => {
      let place = 0, value = 0;
      const tops = times.map((t, i) => {
        while (place < points.length && points[place][0] <= t) value = points[place++][1];
        return bottoms[i] + value;
      });
      const band = { name, colour, times, bottoms, tops };
      bottoms = tops;
      return band;
    });
  }

  // The part of each chart that is shown: of time as a share of its duration, and of memory in bytes.
  const window_ = { from: 0, to: 1, low: 0, high: 1 };
  const charts = [];
  let highest = 1, asked = false;
  const whole = () => window_.to - window_.from === 1 && window_.high - window_.low === highest;

  function show(from, to, low = window_.low, high = window_.high) {
    const longest = Math.max(...charts.map((chart) => chart.duration));
    const width = Math.min(Math.max(to - from, 4 / longest), 1), height = Math.min(Math.max(high - low, 512), highest);
    window_.from = Math.min(Math.max(from, 0), 1 - width);
    window_.to = width === 1 ? 1 : window_.from + width;
    window_.low = Math.min(Math.max(low, 0), highest - height);
    window_.high = window_.low + height;
    if (!asked) requestAnimationFrame(redraw);
    asked = true;
  }
  function redraw() {
    asked = false;
    for (const chart of charts) chart.draw();
  }
  const zoom = (around, factor) => show(around - (around - window_.from) * factor, around + (window_.to - around) * factor);
  const zoomMemory = (around, factor) =>
    show(window_.from, window_.to, around - (around - window_.low) * factor, around + (window_.high - around) * factor);
  const all = () => show(0, 1, 0, highest);

  // What is pointed at is told in the details; a click, or a key, pins it there.
  let pinned = null;
  const tip = byId("tip"), details = byId("details");
  const idle = details?.textContent;
  function tell(text) { if (!pinned) details.textContent = text || idle; }
  function pin(chart, found) {
    pinned = found && found.text ? { chart, found } : null;
    details.classList.toggle("pinned", pinned !== null);
    byId("copy").disabled = byId("unpin").disabled = pinned === null;
    details.textContent = pinned ? found.text : idle;
    details.scrollTop = 0;
    tip.style.display = "none";
    for (const one of charts) one.mark();
  }
  async function copy() {
    if (!pinned) return;
    try {
      await navigator.clipboard.writeText(pinned.found.text);
    } catch { // where a page may not: it is selected, and copied as by hand
      getSelection().selectAllChildren(details);
      document.execCommand("copy");
    }
  }

  class Chart {
    constructor(figure, timeline, blocks) {
      this.canvas = figure.querySelector(".picture");
      this.marks = figure.querySelector(".marks");
      this.timeline = timeline;
      this.blocks = blocks;
      this.bands = stackedBands(timeline.bands);
      this.duration = Math.max(timeline.duration, 1);
      this.lines = Object.entries(timeline.lines).map(([name, points]) =>
        ({ name, times: points.map((p) => p[0]), values: points.map((p) => p[1]) }));
      if (blocks) {
        this.lines.unshift({ name: "active", times: blocks.times, values: blocks.active });
        this.lines.push({ name: "unusable", times: blocks.times, values: blocks.unusable, hatched: true });
      }
      // Not Math.max(...values): a call takes only so many arguments.
      for (const values of [...this.lines.map((line) => line.values), ...this.bands.map((band) => band.tops)]) {
        for (const value of values) if (value * 1.05 > highest) highest = value * 1.05;
      }
    }

    listen() {
      const on = (name, what, options) => this.canvas.addEventListener(name, what, options);
      on("wheel", (event) => {
        if (!(event.ctrlKey || event.metaKey) && whole()) return; // the page scrolls
        event.preventDefault();
        const factor = Math.exp(Math.max(Math.min(event.deltaY, 500), -500) * (event.deltaMode ? 0.05 : 0.002));
        if (event.shiftKey) zoomMemory(this.value(event.offsetY), factor); else zoom(this.share(event.offsetX), factor);
      }, { passive: false });
      on("dblclick", all);
      on("pointerdown", (event) => {
        if (event.button) return;
        this.held = { x: event.offsetX, y: event.offsetY, ...window_, moves: !whole() };
      });
      on("pointermove", (event) => this.moved(event));
      on("pointerup", (event) => this.released(event));
      on("pointercancel", () => { this.held = null; this.mark(); });
      on("pointerleave", () => {
        tip.style.display = "none";
        tell("");
        for (const chart of charts) chart.point(null);
      });
      on("keydown", (event) => this.pressed(event));
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    pressed(event) {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const { from, to, low, high } = window_, step = (to - from) / 10, up = (high - low) / 10;
      const does = {
        "+": () => zoom((from + to) / 2, 0.7), "=": () => zoom((from + to) / 2, 0.7),
        "-": () => zoom((from + to) / 2, 1 / 0.7), 0: all,
        ArrowLeft: () => show(from - step, to - step), ArrowRight: () => show(from + step, to + step),
        m: () => zoomMemory((low + high) / 2, 0.7), M: () => zoomMemory((low + high) / 2, 1 / 0.7),
        n: () => this.step(1), p: () => this.step(-1), c: copy, Escape: () => pin(this, null),
      };
      // With the whole of the memory shown there is nothing to move, and the page scrolls.
      if (high - low < highest) {
        does.ArrowUp = () => show(from, to, low + up, high + up);
        does.ArrowDown = () => show(from, to, low - up, high - up);
      }
      if (!Object.hasOwn(does, event.key)) return;
      event.preventDefault();
      does[event.key]();
    }

    // Pins the next block of those that are drawn, from the largest on.
    step(by) {
      if (!this.drawn) return;
      const numbers = this.drawn.numbers.slice().sort((a, b) => this.blocks.size[b] - this.blocks.size[a] || a - b);
      if (!numbers.length) return;
      const now = numbers.indexOf(pinned?.chart === this ? pinned.found.block : undefined);
      const next = now < 0 ? (by > 0 ? 0 : numbers.length - 1) : (now + by + numbers.length) % numbers.length;
      pin(this, this.told(numbers[next]));
    }

    get inner() { return Math.max(this.canvas.clientWidth - MARGIN.left - MARGIN.right, 1); }
    get height() { return Math.max(this.canvas.clientHeight - MARGIN.top - MARGIN.bottom, 1); }
    get from() { return window_.from * this.duration; }
    get to() { return window_.to * this.duration; }
    x(t) { return MARGIN.left + (t - this.from) / (this.to - this.from) * this.inner; }
    y(value) { return MARGIN.top + this.height * (1 - (value - window_.low) / (window_.high - window_.low)); }
    share(x) { return window_.from + (x - MARGIN.left) / this.inner * (window_.to - window_.from); }
    time(x) { return this.share(x) * this.duration; }
    value(y) { return window_.low + (1 - (y - MARGIN.top) / this.height) * (window_.high - window_.low); }

    moved(event) {
      const held = this.held;
      if (held) {
        if (Math.abs(event.offsetX - held.x) + Math.abs(event.offsetY - held.y) < 4 && !held.dragged) return;
        if (!held.dragged) this.canvas.setPointerCapture(event.pointerId);
        held.dragged = true;
        tip.style.display = "none";
        if (held.moves) {
          const by = (held.x - event.offsetX) / this.inner * (held.to - held.from);
          const up = (event.offsetY - held.y) / this.height * (held.high - held.low);
          show(held.from + by, held.to + by, held.low + up, held.high + up);
        } else {
          held.now = event.offsetX;
          this.mark();
        }
        return;
      }
      const found = this.found(this.time(event.offsetX), this.value(event.offsetY));
      tell(found.text);
      for (const chart of charts) chart.point(this.share(event.offsetX), chart === this ? found.block : undefined);
      if (pinned) return;
      tip.textContent = found.short;
      tip.style.display = "block";
      // Inside of this chart, so that the other one can be seen, and beside of what it tells of.
      const box = this.canvas.getBoundingClientRect();
      const left = event.clientX + 16 + tip.offsetWidth < box.right ? event.clientX + 16 : event.clientX - 16 - tip.offsetWidth;
      tip.style.left = `${Math.max(Math.min(left, innerWidth - tip.offsetWidth), 0)}px`;
      tip.style.top = `${Math.max(event.clientY - 14 - tip.offsetHeight, 0)}px`;
    }

    released(event) {
      const held = this.held;
      this.held = null;
      if (!held) return;
      if (!held.dragged) pin(this, this.found(this.time(event.offsetX), this.value(event.offsetY)));
      else if (!held.moves) show(...[held.x, event.offsetX].map((x) => this.share(x)).sort((a, b) => a - b));
      this.mark();
    }

    // What is at a moment and a height: a long text, a short one, and the block if it is one.
    found(t, value) {
      const { drawn, blocks } = this;
      if (drawn && value >= 0) {
        for (let i = 0; i < drawn.block.length; i++) {
          const low = drawn.bottom[i];
          if (drawn.start[i] <= t && t < drawn.end[i] && low <= value && value < low + blocks.size[drawn.block[i]]) {
            return this.told(drawn.block[i]);
          }
        }
        const place = before(drawn.band.times, t, true) - 1;
        if (place >= 0 && drawn.band.bottoms[place] <= value && value < drawn.band.tops[place]) {
          const said = `${bytes(drawn.band.tops[place] - drawn.band.bottoms[place])} in blocks too small to draw: zoom in`;
          return { text: `${said}\n\n${this.figures(t)}`, short: said };
        }
      }
      for (const band of this.bands) {
        const place = before(band.times, t, true) - 1;
        if (place >= 0 && band.bottoms[place] <= value && value < band.tops[place]) {
          const said = `${bytes(band.tops[place] - band.bottoms[place])} held by\n${band.name}`;
          return { text: `${said}\n\n${this.figures(t)}`, short: said };
        }
      }
      return { text: this.figures(t), short: this.figures(t) };
    }

    figures(t) {
      const told = this.lines.map(({ name, times, values }) => {
        const place = before(times, t, true) - 1;
        return place < 0 ? "" : `${name} ${bytes(values[place])}`;
      });
      return [`at ${time(t)}`, ...told].filter(Boolean).join("\n");
    }

    told(block) {
      const { start, freed, end, size, stack, freed_by, label } = this.blocks;
      const { texts, stacks, sites } = this.timeline;
      const shown = (number) => stacks[number].map((line) => `  ${texts[line]}`);
      const given = Math.min(freed[block], end[block], this.duration), back = Math.min(end[block], this.duration);
      const waits = freed[block] < end[block];
      const said = [`${bytes(size[block])}, held for ${time(given - start[block])}`];
      if (freed[block] === Infinity) said[0] += ", to the end";
      if (waits) said.push(`freed, and unusable for ${time(back - freed[block])} more${end[block] === Infinity ? ", to the end" : ""}`);
      const short = [...said, texts[sites[stack[block]]]].join("\n");
      said.push(`from ${time(start[block])} to ${time(back)}`);
      if (label[block]) said.push(`user_metadata ${texts[label[block] - 1]}`);
      said.push("", "allocated at", ...shown(stack[block]));
      if (waits) said.push("freed at", ...shown(freed_by[block]));
      return { text: said.join("\n"), short, block };
    }

    context(canvas) {
      const ratio = devicePixelRatio || 1;
      const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
      if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
      const c = canvas.getContext("2d");
      c.setTransform(1, 0, 0, 1, 0, 0);
      c.clearRect(0, 0, width, height);
      c.setTransform(ratio, 0, 0, ratio, 0, 0);
      return c;
    }

    clipped(c, what) {
      c.save();
      c.beginPath();
      c.rect(MARGIN.left, MARGIN.top, this.inner, this.height);
      c.clip();
      what();
      c.restore();
    }

    draw() {
      const c = this.context(this.canvas);
      const style = getComputedStyle(document.documentElement);
      const named = {};
      const colour = (name) => named[name] ??= style.getPropertyValue(name).trim();
      const filled = (number) => colour(number < 0 ? "--other" : `--line${number}`);
      this.axes(c, colour);
      this.clipped(c, () => {
        if (this.blocks) this.drawBlocks(c, colour, filled);
        for (const band of this.bands) {
          c.fillStyle = filled(band.colour);
          band.times.forEach((t, i) => {
            // Whole pixels, or thin seams would show between one moment and the next.
            const left = Math.round(this.x(t)), right = Math.round(this.x(band.times[i + 1] ?? this.duration)), top = this.y(band.tops[i]);
            if (right >= MARGIN.left && left <= MARGIN.left + this.inner) c.fillRect(left, top, right - left, this.y(band.bottoms[i]) - top);
          });
        }
        for (const { name, times, values, hatched } of this.lines) {
          if (hatched) continue;
          const [stroke, dashes] = STROKES[name] ?? ["--ink", []];
          c.strokeStyle = colour(stroke);
          c.setLineDash(dashes);
          c.lineWidth = 1.3;
          c.beginPath();
          this.steps(times, values, (x, y) => c.lineTo(x, y));
          c.stroke();
        }
      });
      this.mark();
    }

    // Calls with the corners of what values do at times: of each half of a pixel the largest.
    steps(times, values, corner) {
      const first = Math.max(before(times, this.from, true) - 1, 0), last = Math.min(before(times, this.to) + 1, times.length);
      let y = null;
      for (let i = first; i < last;) {
        const x = this.x(Math.max(times[i], this.from));
        let most = values[i++];
        while (i < last && this.x(times[i]) < x + 0.5) most = Math.max(most, values[i++]);
        if (y !== null) corner(x, y);
        y = this.y(most);
        corner(x, y);
      }
      if (y !== null) corner(this.x(Math.min(this.to, this.duration)), y);
    }

    drawBlocks(c, colour, filled) {
      const { blocks, timeline } = this;
      const drawn = this.drawn = blocks.picture(this.from, this.to, window_.high - window_.low, this.inner, this.height);
      c.fillStyle = colour("--small");
      c.beginPath();
      c.moveTo(this.x(this.from), this.y(0));
      this.steps(drawn.band.times, drawn.band.tops, (x, y) => c.lineTo(x, y));
      c.lineTo(this.x(this.to), this.y(0));
      c.fill();
      const hatch = this.hatch(c, colour("--unusable"), colour("--hatch"));
      const fills = timeline.colours.map(filled);
      const ratio = devicePixelRatio || 1;
      const snapped = (place) => Math.round(place * ratio) / ratio; // or thin seams would show between pieces
      for (let i = 0; i < drawn.block.length; i++) {
        const number = drawn.block[i], low = drawn.bottom[i];
        const top = snapped(this.y(low + blocks.size[number])), bottom = snapped(this.y(low));
        const left = snapped(this.x(drawn.start[i])), right = snapped(this.x(drawn.end[i]));
        const freed = Math.min(Math.max(snapped(this.x(blocks.freed[number])), left), right);
        const height = bottom - top - (bottom - top > 4 ? 1 : 0); // a gap, to tell one from the next
        if (height <= 0 || right <= left) continue;
        // A gap at the left as well, of blocks that follow one another in one place.
        const gap = drawn.start[i] === blocks.start[number] && right - left > 6 ? 1 : 0;
        c.fillStyle = fills[blocks.stack[number]];
        if (freed > left) c.fillRect(left + gap, bottom - height, freed - left - gap, height);
        if (right > freed) {
          c.fillStyle = hatch;
          c.fillRect(freed, bottom - height, right - freed, height);
        }
      }
    }

    hatch(c, ground, stroke) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 8;
      const d = tile.getContext("2d");
      d.fillStyle = ground;
      d.fillRect(0, 0, 8, 8);
      d.strokeStyle = stroke;
      d.lineWidth = 1.4;
      for (const shift of [-8, 0, 8]) {
        d.beginPath(); d.moveTo(shift - 1, 9); d.lineTo(shift + 9, -1); d.stroke();
      }
      return c.createPattern(tile, "repeat");
    }

    // What lies over the picture: what is marked, pinned or pointed at, and the same moment in all charts.
    mark() { this.point(this.pointed, this.near); }
    point(share, near) {
      this.pointed = share;
      this.near = near;
      const c = this.context(this.marks), style = getComputedStyle(document.documentElement);
      this.clipped(c, () => {
        c.strokeStyle = style.getPropertyValue("--ink");
        if (share != null && !this.held) {
          const x = this.x(share * this.duration);
          c.globalAlpha = 0.5;
          c.beginPath(); c.moveTo(x, 0); c.lineTo(x, this.canvas.clientHeight); c.stroke();
          c.globalAlpha = 1;
        }
        c.lineWidth = 2;
        const shown = pinned?.chart === this ? pinned.found.block : near;
        if (shown !== undefined && this.drawn) {
          const { block, start, end, bottom } = this.drawn, size = this.blocks.size[shown];
          // Its outline only: a piece begins and ends where another one does.
          let last = null;
          c.beginPath();
          for (let i = 0; i < block.length; i++) {
            if (block[i] !== shown) continue;
            const left = this.x(start[i]), right = this.x(end[i]), low = this.y(bottom[i]), top = this.y(bottom[i] + size);
            c.moveTo(left, last ? last.top : low); c.lineTo(left, top); c.lineTo(right, top);
            c.moveTo(left, last ? last.low : low); c.lineTo(left, low); c.lineTo(right, low);
            last = { right, low, top };
          }
          if (last) { c.moveTo(last.right, last.low); c.lineTo(last.right, last.top); }
          c.stroke();
        }
        if (this.held?.now !== undefined) {
          c.fillStyle = style.getPropertyValue("--accent");
          c.globalAlpha = 0.25;
          c.fillRect(this.held.x, 0, this.held.now - this.held.x, this.canvas.clientHeight);
        }
      });
    }

    axes(c, colour) {
      c.font = "11px system-ui, sans-serif";
      c.fillStyle = colour("--soft");
      c.strokeStyle = colour("--axis");
      c.setLineDash([]);
      c.lineWidth = 1;
      c.textAlign = "right";
      const [unit, name] = UNITS.find(([one]) => window_.high >= (one === 2 ** 30 ? 10 * one : one));
      const step = nice((window_.high - window_.low) / unit, Math.max(this.height / 60, 2)) * unit;
      for (let value = Math.ceil(window_.low / step) * step; value <= window_.high; value += step) {
        const y = this.y(value);
        c.beginPath(); c.moveTo(MARGIN.left, y); c.lineTo(MARGIN.left + this.inner, y); c.stroke();
        c.fillText(`${+(value / unit).toFixed(3)} ${name}`, MARGIN.left - 6, y + 4);
      }
      c.textAlign = "center";
      const { from, to } = this;
      const [scale, called] = to >= 1e7 ? [1e6, "s"] : [1e3, "ms"];
      const every = nice((to - from) / scale, Math.max(this.inner / 110, 2)) * scale;
      for (let t = Math.ceil(from / every) * every; t <= to; t += every) {
        const text = `${+(t / scale).toFixed(6)} ${called}`, half = c.measureText(text).width / 2;
        c.fillText(text, Math.min(this.x(t), this.canvas.clientWidth - half), this.canvas.clientHeight - 8);
      }
    }
  }

  const figures = [...document.querySelectorAll("#timelines figure")];
  for (const [number, timeline] of timelines.entries()) {
    const blocks = timeline.columns.data ? new Blocks(await unpacked(timeline.columns)) : null;
    charts.push(new Chart(figures[number], timeline, blocks));
  }
  if (charts.length) {
    window_.high = highest;
    for (const chart of charts) chart.listen();
    const middle = () => (window_.from + window_.to) / 2;
    byId("in").onclick = () => zoom(middle(), 0.5);
    byId("out").onclick = () => zoom(middle(), 2);
    byId("all").onclick = all;
    byId("copy").onclick = copy;
    byId("unpin").onclick = () => pin(null, null);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("keydown", (event) => { if (event.key === "Escape") pin(null, null); });
    redraw();
  }
  window.report = { charts, show, redraw, all, shown: window_ };
  document.documentElement.dataset.drawn = String(charts.length);
})();
