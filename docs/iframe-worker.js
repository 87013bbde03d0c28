// A page that is opened from a folder may not start workers, and the search runs in one. There its code runs in a hidden
// frame instead. The theme's `offline` plugin loads such a script from a server unless a file of this name is given.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        script.src = address
        script.onload = resolve
        script.onerror = reject
        frame.contentDocument.head.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
