package apiserver

import (
	"io"
	"net/http"
	"sync"
	"time"
)

// pace is what a client must keep up, so that none holds a request for ever.
type pace struct {
	idle  time.Duration // a connection without a request ends after it
	body  time.Duration // a body may take this long ...
	rate  int64         // ... and one second more for each rate bytes of it
	stall time.Duration // an answer of which nothing is taken for so long is given up
}

var usualPace = pace{idle: 90 * time.Second, body: 30 * time.Second, rate: 16 << 10, stall: 30 * time.Second}

// paced holds the clients of h to the pace. A stream on which nothing is written,
// such as an idle watch, may last.
func (p pace) paced(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		if r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0 {
			b := &pacedBody{ReadCloser: r.Body, control: control, pace: p, began: time.Now()}
			b.arm()
			r.Body = b
			defer b.leave()
		}
		if r.ProtoMajor < 2 { // whole connections are held to it by their door
			h.ServeHTTP(w, r)
			return
		}
		out := &pacedWriter{ResponseWriter: w, control: control, stall: p.stall}
		defer out.end()
		h.ServeHTTP(out, r)
	})
}

// pacedBody ends a body that comes too slowly. What a handler has begun, such as a proxy's request to another server, may go on
// reading when it has returned.
type pacedBody struct {
	io.ReadCloser
	control *http.ResponseController
	pace    pace
	began   time.Time
	n       int64

	mu   sync.Mutex
	over bool // the body has ended, or the handler has returned: then the stream is not ours any more, and must not be touched
}

// arm sets the time by which the next bytes must be there.
func (b *pacedBody) arm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return
	}
	earned := time.Duration(b.n/b.pace.rate) * time.Second
	_ = b.control.SetReadDeadline(b.began.Add(b.pace.body + earned)) // a writer of a test may have none
}

// Read implements io.Reader.
func (b *pacedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.n += int64(n); err != nil {
		b.end()
	} else {
		b.arm()
	}
	return n, err
}

// end leaves the connection to what follows: a request that takes its time has no more to send. What a handler
// has not read keeps its deadline: the server reads it to its end.
func (b *pacedBody) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.over {
		b.over = true
		_ = b.control.SetReadDeadline(time.Time{})
	}
}

// leave is called when the handler returns.
func (b *pacedBody) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
}

// pacedWriter gives up a stream of HTTP/2 whose client takes nothing of it. The
// connection below may be lively all the while.
type pacedWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration

	mu    sync.Mutex
	timer *time.Timer
	over  bool // the handler has returned: the stream is not ours any more
}

// portion is how much must be taken within one stall.
const portion = 32 << 10

// Write implements io.Writer.
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

// FlushError is for http.ResponseController.
func (w *pacedWriter) FlushError() error {
	w.watch()
	defer w.rest()
	return w.control.Flush()
}

// Flush implements http.Flusher.
func (w *pacedWriter) Flush() { _ = w.FlushError() }

// Unwrap is for http.ResponseController.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// watch begins to measure a write.
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

// end leaves the server a stall to send what it still holds.
func (w *pacedWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	if w.timer != nil {
		w.timer.Stop()
		_ = w.control.SetWriteDeadline(time.Now().Add(w.stall))
	}
}
