"use strict";
// Draws each timeline on its canvas: blocks as rectangles, red from when they were freed; what collectives held as
// bands; lines above. The window of time that is shown is the state; the vertical scale is the same for all.
(() => {
  const timelines = JSON.parse(document.getElementById("data").textContent);
  const hover = document.getElementById("hover");
  const MARGIN = { left: 64, right: 10, top: 10, bottom: 26 };
  const LINES = { active: ["#000", []], reserved: ["#555", [2, 3]], unusable: ["#700", []], arena: ["#06c", []] };
  // Not Math.max(...values): a call takes only so many arguments.
  const highest = timelines.flatMap((t) => [
    ...Object.values(t.lines).flatMap((points) => points.map((p) => p[1])),
    ...t.blocks.map((b) => b[3] + b[4]),
    ...stacked(t).flatMap((band) => band.tops),
  ]).reduce((most, value) => Math.max(most, value), 1);

  const colour = (number) => `hsl(${(number * 137.5 + 200) % 360 | 0} 55% ${62 + (number % 3) * 6}%)`;
  const bytes = (n) => n >= 1 << 20 ? `${(n / (1 << 20)).toFixed(1)} MiB` : n >= 1024 ? `${(n / 1024).toFixed(1)} KiB` : `${n} B`;
  const time = (us) => us >= 1e6 ? `${(us / 1e6).toFixed(3)} s` : `${(us / 1e3).toFixed(3)} ms`;

  // The value at each moment of what changes at points, and on it the bands below.
  function stacked(timeline) {
    const names = Object.keys(timeline.bands);
    const times = [...new Set(names.flatMap((name) => timeline.bands[name].map((p) => p[0])))].sort((a, b) => a - b);
    let bottoms = times.map(() => 0);
    return names.map((name) => {
      const points = timeline.bands[name];
      let place = 0, value = 0;
      const tops = times.map((t, i) => {
        while (place < points.length && points[place][0] <= t) value = points[place++][1];
        return bottoms[i] + value;
      });
      const band = { name, times, bottoms, tops };
      bottoms = tops;
      return band;
    });
  }

  // The first of sorted points that is later than t.
  function after(points, t) {
    let low = 0, high = points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle] <= t) low = middle + 1; else high = middle;
    }
    return low;
  }

  class View {
    constructor(canvas, timeline) {
      this.canvas = canvas;
      this.timeline = timeline;
      this.bands = stacked(timeline);
      this.start = 0;
      this.end = Math.max(timeline.duration, 1);
      canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        this.zoom(this.time(event.offsetX), Math.exp(event.deltaY * 0.002));
      }, { passive: false });
      canvas.addEventListener("dblclick", () => this.show(0, timeline.duration));
      canvas.addEventListener("pointerdown", (event) => {
        canvas.setPointerCapture(event.pointerId);
        this.held = event.offsetX;
      });
      canvas.addEventListener("pointerup", () => { this.held = null; });
      canvas.addEventListener("pointermove", (event) => this.moved(event));
      canvas.addEventListener("pointerleave", () => { hover.style.display = "none"; });
      canvas.addEventListener("keydown", (event) => {
        const middle = (this.start + this.end) / 2, step = (this.end - this.start) / 10;
        if (event.key === "+") this.zoom(middle, 0.7);
        else if (event.key === "-") this.zoom(middle, 1.4);
        else if (event.key === "ArrowLeft") this.show(this.start - step, this.end - step);
        else if (event.key === "ArrowRight") this.show(this.start + step, this.end + step);
        else if (event.key === "0") this.show(0, timeline.duration);
      });
      new ResizeObserver(() => this.draw()).observe(canvas);
      this.draw();
    }

    get inner() { return this.canvas.clientWidth - MARGIN.left - MARGIN.right; }
    get height() { return this.canvas.clientHeight - MARGIN.top - MARGIN.bottom; }
    x(t) { return MARGIN.left + (t - this.start) / (this.end - this.start) * this.inner; }
    y(value) { return MARGIN.top + this.height * (1 - value / (highest * 1.05)); }
    time(x) { return this.start + (x - MARGIN.left) / this.inner * (this.end - this.start); }
    value(y) { return (1 - (y - MARGIN.top) / this.height) * highest * 1.05; }

    zoom(around, factor) {
      this.show(around - (around - this.start) * factor, around + (this.end - around) * factor);
    }

    show(start, end) {
      const all = Math.max(this.timeline.duration, 1);
      const width = Math.min(Math.max(end - start, 1), all);
      this.start = Math.min(Math.max(start, 0), all - width);
      this.end = this.start + width;
      this.draw();
    }

    moved(event) {
      if (this.held != null) {
        const by = this.time(this.held) - this.time(event.offsetX);
        this.held = event.offsetX;
        this.show(this.start + by, this.end + by);
        return;
      }
      const text = this.describe(this.time(event.offsetX), this.value(event.offsetY));
      hover.style.display = text ? "block" : "none";
      hover.textContent = text;
      hover.style.left = `${Math.min(event.clientX + 14, innerWidth - hover.offsetWidth - 8)}px`;
      hover.style.top = `${Math.min(event.clientY + 14, innerHeight - hover.offsetHeight - 8)}px`;
    }

    describe(t, value) {
      const { blocks, texts, stacks, lines } = this.timeline;
      const shown = (number) => stacks[number].map((line) => `  ${texts[line]}`);
      const found = blocks.find((b) => b[0] <= t && t < b[2] && b[3] <= value && value < b[3] + b[4]);
      if (found) {
        const [start, freed, end, , size, made, freedBy, label] = found;
        const said = [`${bytes(size)}, held for ${time((freed ?? end) - start)}`];
        if (freed != null && end > freed) said.push(`freed, and unusable for ${time(end - freed)} more`);
        if (label != null) said.push(`user_metadata ${texts[label]}`);
        said.push("", "allocated at", ...shown(made));
        if (freed != null && end > freed) said.push("freed at", ...shown(freedBy));
        return said.join("\n");
      }
      for (const band of this.bands) {
        const place = after(band.times, t) - 1;
        if (place >= 0 && band.bottoms[place] <= value && value < band.tops[place]) {
          return `${bytes(band.tops[place] - band.bottoms[place])} held by\n${band.name}`;
        }
      }
      const figures = Object.entries(lines).map(([name, points]) => {
        const place = after(points.map((p) => p[0]), t) - 1;
        return place < 0 ? "" : `${name} ${bytes(points[place][1])}`;
      });
      return [time(t), ...figures.filter(Boolean)].join("\n");
    }

    draw() {
      const ratio = devicePixelRatio || 1;
      this.canvas.width = this.canvas.clientWidth * ratio;
      this.canvas.height = this.canvas.clientHeight * ratio;
      const c = this.canvas.getContext("2d");
      c.scale(ratio, ratio);
      c.clearRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
      this.axes(c);
      c.save();
      c.beginPath();
      c.rect(MARGIN.left, MARGIN.top, this.inner, this.height);
      c.clip();
      for (const [start, freed, end, bottom, size, made] of this.timeline.blocks) {
        if (end < this.start || start > this.end) continue;
        const top = this.y(bottom + size), height = Math.max(this.y(bottom) - top - 0.5, 0.5);
        const left = this.x(start), middle = this.x(freed ?? end), right = this.x(end);
        c.fillStyle = colour(made);
        c.fillRect(left, top, Math.max(middle - left, 0.5), height);
        if (right > middle) {
          c.fillStyle = "#d93333";
          c.fillRect(middle, top, right - middle, height);
        }
      }
      this.bands.forEach((band, number) => {
        c.fillStyle = colour(number + 1);
        band.times.forEach((t, i) => {
          const right = this.x(band.times[i + 1] ?? this.timeline.duration);
          const top = this.y(band.tops[i]);
          c.fillRect(this.x(t), top, right - this.x(t), this.y(band.bottoms[i]) - top);
        });
      });
      for (const [name, points] of Object.entries(this.timeline.lines)) {
        const [stroke, dashes] = LINES[name] ?? ["#080", []];
        c.strokeStyle = stroke;
        c.setLineDash(dashes);
        c.lineWidth = 1.3;
        c.beginPath();
        points.forEach(([t, value], i) => {
          if (i) c.lineTo(this.x(t), this.y(points[i - 1][1]));
          c.lineTo(this.x(t), this.y(value));
        });
        c.stroke();
      }
      c.restore();
    }

    axes(c) {
      c.font = "11px system-ui, sans-serif";
      c.fillStyle = "#555";
      c.strokeStyle = "#e8e8e8";
      const nice = (range) => {
        const raw = range / 6, base = 10 ** Math.floor(Math.log10(raw));
        return [1, 2, 5, 10].map((m) => m * base).find((m) => m >= raw);
      };
      c.textAlign = "right";
      const unit = highest >= 1 << 20 ? 1 << 20 : 1024, name = unit === 1024 ? "KiB" : "MiB";
      const step = nice(highest / unit) * unit;
      for (let value = 0; value <= highest * 1.05; value += step) {
        const y = this.y(value);
        c.beginPath(); c.moveTo(MARGIN.left, y); c.lineTo(MARGIN.left + this.inner, y); c.stroke();
        c.fillText(`${+(value / unit).toFixed(2)} ${name}`, MARGIN.left - 6, y + 4);
      }
      c.textAlign = "center";
      const every = nice((this.end - this.start) / 1e3) * 1e3;
      for (let t = Math.ceil(this.start / every) * every; t <= this.end; t += every) {
        c.fillText(`${+(t / 1e3).toFixed(3)} ms`, this.x(t), this.canvas.clientHeight - 8);
      }
    }
  }

  const canvases = [...document.querySelectorAll("canvas")];
  window.views = canvases.map((canvas, number) => new View(canvas, timelines[number]));
  document.documentElement.dataset.drawn = String(window.views.length);
})();
