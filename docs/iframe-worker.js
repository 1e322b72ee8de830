/* Search in a site that is opened as a file: browsers start no worker from a file, so its script runs in a frame.
   The plugin "offline" would load such a script from another host; it looks for the name of this file. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }))
      this.frame.srcdoc = `<script>
        postMessage = (data) => parent.postMessage(data, "*")
        importScripts = async (...urls) => {
          for (const src of urls)
            await new Promise((resolve) =>
              document.head.append(Object.assign(document.createElement("script"), { src, onload: resolve })))
        }
      </script><script src="${url}"></script>`
      addEventListener("message", ({ source, data }) => {
        if (source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data }))
      })
      document.body.append(this.frame)
    }
    async postMessage(data) {
      await this.ready
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
