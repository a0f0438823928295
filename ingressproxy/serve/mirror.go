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

// mirrorTimeout bounds a copy and its answer, which nobody waits for.
const mirrorTimeout = 30 * time.Second

// mirror sends copies of a request where the rule says, once its body has come; the request itself never waits for them.
// A copy is left out, and counted, when its body is too large or too many copies run.
func (x *exchange) mirror(r *http.Request) {
	var to []route.Mirror
	for _, f := range x.shares {
		for _, m := range f.Mirrors {
			if m.Chosen(rand.Uint64()) {
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
		x.send(copied, to, nil)
		return
	}
	r.Body = &teed{ReadCloser: r.Body, room: x.limits.MirrorBytes, full: func(body []byte) { x.send(copied, to, body) },
		over: func() { x.metrics.unmirrored.Add(float64(len(to))) }}
}

func (x *exchange) send(r *http.Request, to []route.Mirror, body []byte) {
	for _, m := range to {
		pool := x.state.pools[m.Pool]
		select {
		case x.mirrors <- struct{}{}:
		default:
			x.metrics.unmirrored.Inc()
			continue
		}
		x.going.Go(func() {
			defer func() { <-x.mirrors }()
			if pool == nil || !x.copyTo(pool, r, body) {
				x.metrics.unmirrored.Inc()
			}
		})
	}
}

func (x *exchange) copyTo(pool *pool, r *http.Request, body []byte) bool {
	ctx, cancel := context.WithTimeout(x.hard, mirrorTimeout)
	defer cancel()
	out := r.Clone(ctx)
	for _, name := range hopByHop(out.Header) {
		out.Header.Del(name)
	}
	x.forwarded(out.Header)
	out.URL.Scheme, out.URL.Host = pool.scheme(), "endpoint"
	x.filter(out, x.shares)
	out.Body, out.ContentLength, out.TransferEncoding = nil, 0, nil
	if len(body) > 0 {
		out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	answer, err := (&attempt{x: x, pool: pool}).RoundTrip(out)
	if err != nil {
		return false
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return err == nil
}

// hopByHop are the headers that are meant for this proxy alone (RFC 9110, section 7.6.1).
func hopByHop(h http.Header) []string {
	names := []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			names = append(names, strings.TrimSpace(name))
		}
	}
	return names
}

// teed keeps what is read of a body until it has ended, or is too large.
type teed struct {
	io.ReadCloser
	room int64
	full func([]byte)
	over func()

	mu   sync.Mutex
	kept []byte
	done bool
}

func (t *teed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.done {
		return n, err
	}
	if int64(len(t.kept)+n) > t.room {
		t.done, t.kept = true, nil
		t.over()
		return n, err
	}
	t.kept = append(t.kept, p[:n]...)
	if err == io.EOF {
		t.done = true
		t.full(t.kept)
	}
	return n, err
}
