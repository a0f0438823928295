package apiserver

import (
	"io"
	"net/http"
	"sync"
	"time"
)

// clientPace holds the time limits within which a client must send its request and read the
// response, so that no client holds a request open forever.
type clientPace struct {
	idle  time.Duration // a connection without a request is closed after this time
	body  time.Duration // a request body may take this long ...
	rate  int64         // ... plus one second for each rate bytes of the body
	stall time.Duration // a stream is reset if the client reads none of the response for this long
}

var defaultPace = clientPace{idle: 90 * time.Second, body: 30 * time.Second, rate: 16 << 10, stall: 30 * time.Second}

// limitHandler returns a handler that calls h within the time limits of p. A stream on which
// nothing is written, such as an idle watch, is not limited.
func (p clientPace) limitHandler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		if r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0 {
			b := &pacedBody{ReadCloser: r.Body, control: control, pace: p, began: time.Now()}
			b.extendDeadline()
			r.Body = b
			defer b.releaseStream()
		}
		if r.ProtoMajor < 2 { // over HTTP/1.1, connlimit limits the whole connection
			h.ServeHTTP(w, r)
			return
		}
		out := &pacedWriter{ResponseWriter: w, control: control, stall: p.stall}
		defer out.finishWrites()
		h.ServeHTTP(out, r)
	})
}

// pacedBody is a request body that arrives at a minimum speed; otherwise reads fail. A reader, such
// as the outgoing request of a proxy, may continue to read after the handler has returned.
type pacedBody struct {
	io.ReadCloser
	control  *http.ResponseController
	pace     clientPace
	began    time.Time
	received int64

	mu       sync.Mutex
	released bool // the body has ended or the handler has returned: the stream's deadline must no longer be changed
}

// extendDeadline sets the deadline of the next read to pace.body after the start, plus one second
// for each pace.rate bytes received.
func (b *pacedBody) extendDeadline() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.released {
		return
	}
	earned := time.Duration(b.received/b.pace.rate) * time.Second
	// response writers of tests may not support deadlines
	_ = b.control.SetReadDeadline(b.began.Add(b.pace.body + earned))
}

// Read reads from the body and extends the deadline. It implements io.Reader.
func (b *pacedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.received += int64(n); err != nil {
		b.clearDeadline()
	} else {
		b.extendDeadline()
	}
	return n, err
}

// clearDeadline removes the read deadline at the end of the body, because the client has nothing
// more to send. A body that the handler has not read keeps its deadline, because the server reads
// the rest.
func (b *pacedBody) clearDeadline() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.released {
		b.released = true
		_ = b.control.SetReadDeadline(time.Time{})
	}
}

// releaseStream records that the handler has returned, after which the deadline is not changed
// anymore.
func (b *pacedBody) releaseStream() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.released = true
}

// pacedWriter is a response writer that resets the HTTP/2 stream if the client does not read the
// response for the time stall. The limit applies to the stream even if the connection is active.
type pacedWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration

	mu       sync.Mutex
	timer    *time.Timer
	finished bool // the handler has returned: the stream's deadline must no longer be changed
}

// writePortion is the number of bytes that the client must read within one stall time.
const writePortion = 32 << 10

// Write writes p in portions, each within the stall time. It implements io.Writer.
func (w *pacedWriter) Write(p []byte) (n int, err error) {
	for {
		part := p[n:min(n+writePortion, len(p))]
		w.startTimer()
		m, err := w.ResponseWriter.Write(part)
		w.stopTimer()
		n += m
		if err != nil || n == len(p) {
			return n, err
		}
	}
}

// FlushError flushes within the stall time. http.ResponseController calls it.
func (w *pacedWriter) FlushError() error {
	w.startTimer()
	defer w.stopTimer()
	return w.control.Flush()
}

// Flush is FlushError without the error. It implements http.Flusher.
func (w *pacedWriter) Flush() { _ = w.FlushError() }

// Unwrap returns the wrapped writer for http.ResponseController.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// startTimer starts the timer that resets the stream if a write takes longer than stall.
func (w *pacedWriter) startTimer() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer == nil {
		w.timer = time.AfterFunc(w.stall, w.resetStream)
		return
	}
	w.timer.Reset(w.stall)
}

func (w *pacedWriter) stopTimer() { w.timer.Stop() }

func (w *pacedWriter) resetStream() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.finished {
		_ = w.control.SetWriteDeadline(time.Now().Add(-time.Second))
	}
}

// finishWrites stops the timer after the handler has returned, and gives the server one stall time
// to send buffered data.
func (w *pacedWriter) finishWrites() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.finished = true
	if w.timer != nil {
		w.timer.Stop()
		_ = w.control.SetWriteDeadline(time.Now().Add(w.stall))
	}
}
