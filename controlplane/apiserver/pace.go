package apiserver

import (
	"io"
	"net/http"
	"sync"
	"time"
)

// pace holds the time limits that a client must meet, so that no client holds a request open
// forever.
type pace struct {
	idle  time.Duration // a connection without a request is closed after this time
	body  time.Duration // a request body may take this long ...
	rate  int64         // ... plus one second for each rate bytes of the body
	stall time.Duration // a stream is reset if the client reads none of the response for this long
}

var usualPace = pace{idle: 90 * time.Second, body: 30 * time.Second, rate: 16 << 10, stall: 30 * time.Second}

// paced returns h with the limits of the pace. A stream on which nothing is written, such as an
// idle watch, is not limited.
func (p pace) paced(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		if r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0 {
			b := &pacedBody{ReadCloser: r.Body, control: control, pace: p, began: time.Now()}
			b.arm()
			r.Body = b
			defer b.leave()
		}
		if r.ProtoMajor < 2 { // over HTTP/1.1, connlimit applies the limit to the whole connection
			h.ServeHTTP(w, r)
			return
		}
		out := &pacedWriter{ResponseWriter: w, control: control, stall: p.stall}
		defer out.end()
		h.ServeHTTP(out, r)
	})
}

// pacedBody fails the read of a body that arrives too slowly. A reader such as a proxy's outgoing
// request may continue to read after the handler has returned.
type pacedBody struct {
	io.ReadCloser
	control *http.ResponseController
	pace    pace
	began   time.Time
	n       int64

	mu   sync.Mutex
	over bool // the body has ended or the handler has returned: the stream's deadline must no longer be changed
}

// arm sets the deadline of the next read: pace.body plus one second for each pace.rate bytes
// received.
func (b *pacedBody) arm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return
	}
	earned := time.Duration(b.n/b.pace.rate) * time.Second
	_ = b.control.SetReadDeadline(b.began.Add(b.pace.body + earned)) // response writers of tests may not support deadlines
}

// Read reads from the body and extends the deadline. It implements io.Reader.
func (b *pacedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.n += int64(n); err != nil {
		b.end()
	} else {
		b.arm()
	}
	return n, err
}

// end removes the read deadline, because a request that still runs has no more body to send. A body
// that the handler has not read keeps its deadline, because the server reads it to its end.
func (b *pacedBody) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.over {
		b.over = true
		_ = b.control.SetReadDeadline(time.Time{})
	}
}

// leave marks the handler as returned: the deadline is no longer changed.
func (b *pacedBody) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
}

// pacedWriter resets an HTTP/2 stream if the client does not read the response for the time of
// stall. The limit applies to the stream even if the connection is active.
type pacedWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration

	mu    sync.Mutex
	timer *time.Timer
	over  bool // the handler has returned: the stream's deadline must no longer be changed
}

// portion is the number of bytes that the client must read within one stall time.
const portion = 32 << 10

// Write writes p in portions, each within the stall time. It implements io.Writer.
func (w *pacedWriter) Write(p []byte) (n int, err error) {
	for {
		part := p[n:min(n+portion, len(p))]
		w.watch()
		m, err := w.ResponseWriter.Write(part)
		w.rest()
		n += m
		if err != nil || n == len(p) {
			return n, err
		}
	}
}

// FlushError flushes within the stall time. http.ResponseController calls it.
func (w *pacedWriter) FlushError() error {
	w.watch()
	defer w.rest()
	return w.control.Flush()
}

// Flush is FlushError without the error. It implements http.Flusher.
func (w *pacedWriter) Flush() { _ = w.FlushError() }

// Unwrap returns the wrapped writer for http.ResponseController.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// watch starts the stall timer of a write.
func (w *pacedWriter) watch() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer == nil {
		w.timer = time.AfterFunc(w.stall, w.giveUp)
		return
	}
	w.timer.Reset(w.stall)
}

func (w *pacedWriter) rest() { w.timer.Stop() }

func (w *pacedWriter) giveUp() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		_ = w.control.SetWriteDeadline(time.Now().Add(-time.Second))
	}
}

// end stops the timer after the handler has returned, and gives the server one stall time to send
// buffered data.
func (w *pacedWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	if w.timer != nil {
		w.timer.Stop()
		_ = w.control.SetWriteDeadline(time.Now().Add(w.stall))
	}
}
