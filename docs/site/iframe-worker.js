"use strict";
// A browser starts no worker for a page that is read from the disk. There, what the search would run in one runs in a
// hidden frame instead, which has the same origin as the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const address = new URL(url, location.href).href;
      this.inside = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.title = "search";
        frame.srcdoc = "<!doctype html><title>search</title><body></body>";
        frame.onload = () => {
          const inside = frame.contentWindow, script = inside.document.createElement("script");
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          script.src = address;
          script.onload = () => resolve(inside);
          inside.document.body.append(script);
        };
        document.body.append(frame);
      });
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
