package serve

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/ingressproxy/route"
)

// mirrorTimeout is the maximum time for a mirrored request and its response.
const mirrorTimeout = 30 * time.Second

// mirrorRequest sends copies of request r to the mirrors of its rule, once the body of r was read
// completely. r itself is not delayed. A copy is omitted, and counted, if its body is too large or
// if too many copies are in progress.
func (x *exchange) mirrorRequest(r *http.Request) {
	var to []route.Mirror
	for _, f := range x.filters {
		for _, m := range f.Mirrors {
			if m.Samples(rand.Uint64()) {
				to = append(to, m)
			}
		}
	}
	if len(to) == 0 || r.Header.Get("Upgrade") != "" {
		return
	}
	copied := r.Clone(context.WithoutCancel(r.Context()))
	copied.RequestURI = ""
	if r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 {
		x.sendMirrors(copied, to, nil)
		return
	}
	r.Body = &teeBody{ReadCloser: r.Body, limit: x.server.limits.MirrorBytes, onComplete: func(body []byte) {
		x.sendMirrors(copied, to, body)
	},
		onTooLarge: func() { x.server.metrics.mirrorsLost.Add(float64(len(to))) }}
}

func (x *exchange) sendMirrors(r *http.Request, to []route.Mirror, body []byte) {
	for _, m := range to {
		pool := x.state.pools[m.Pool]
		select {
		case x.server.slots.mirrors <- struct{}{}:
		default:
			x.server.metrics.mirrorsLost.Inc()
			continue
		}
		x.server.running.Go(func() {
			defer func() { <-x.server.slots.mirrors }()
			if pool == nil || !x.sendMirror(pool, r, body) {
				x.server.metrics.mirrorsLost.Inc()
			}
		})
	}
}

func (x *exchange) sendMirror(pool *pool, r *http.Request, body []byte) bool {
	ctx, cancel := context.WithTimeout(x.server.abortCtx, mirrorTimeout)
	defer cancel()
	out := r.Clone(ctx)
	for _, name := range hopByHopHeaders(out.Header) {
		out.Header.Del(name)
	}
	x.setForwardedHeaders(out.Header)
	out.URL.Scheme, out.URL.Host = pool.backendScheme(), "endpoint"
	x.applyFilters(out, x.filters)
	out.Body, out.ContentLength, out.TransferEncoding = nil, 0, nil
	if len(body) > 0 {
		out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	answer, err := (&retryTransport{exchange: x, pool: pool}).RoundTrip(out)
	if err != nil {
		return false
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return err == nil
}

// hopByHopHeaders returns the header fields that apply to one connection only (RFC 9110, section
// 7.6.1).
func hopByHopHeaders(h http.Header) []string {
	names := []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te",
		"Trailer", "Transfer-Encoding", "Upgrade"}
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			names = append(names, strings.TrimSpace(name))
		}
	}
	return names
}

// teeBody is a request body that keeps a copy of the data that is read from it. It calls onComplete
// at the end of the body, or onTooLarge if the body exceeds limit bytes.
type teeBody struct {
	io.ReadCloser
	limit      int64
	onComplete func([]byte)
	onTooLarge func()

	mu     sync.Mutex
	copied []byte
	done   bool
}

func (t *teeBody) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.done {
		return n, err
	}
	if int64(len(t.copied)+n) > t.limit {
		t.done, t.copied = true, nil
		t.onTooLarge()
		return n, err
	}
	t.copied = append(t.copied, p[:n]...)
	if err == io.EOF {
		t.done = true
		t.onComplete(t.copied)
	}
	return n, err
}
