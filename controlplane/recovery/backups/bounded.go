package backups

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"time"
)

// boundedTransport is an HTTP transport for requests to an untrusted S3 server. It cancels a
// request that sends and receives no data for the duration stallTimeout. It limits the size of all
// responses except backups.
type boundedTransport struct {
	ways         http.RoundTripper
	stallTimeout time.Duration
}

var errResponseTooLarge = errors.New("the response of the server is too large")

// RoundTrip sends req and returns the response. The request is canceled if no data is sent or
// received for stallTimeout. Reading a response that is not a backup fails if the response is too
// large.
func (b *boundedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	stop := func() { cancel(fmt.Errorf("the server made no progress for %s", b.stallTimeout)) }
	p := &stallTimer{timer: time.AfterFunc(b.stallTimeout, stop), stallTimeout: b.stallTimeout}
	again := req.Clone(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		again.Body = &monitoredBody{ReadCloser: req.Body, p: p, left: -1}
	}
	resp, err := b.ways.RoundTrip(again)
	if err != nil {
		p.timer.Stop()
		if cause := context.Cause(ctx); cause != nil && req.Context().Err() == nil {
			err = cause
		}
		cancel(nil)
		return nil, err
	}
	left := int64(maxResponseBytes)
	if req.Method == http.MethodGet && req.URL.RawQuery == "" && resp.StatusCode < 300 {
		left = -1 // for a backup: the code that reads it checks its size
	}
	resp.Body = &monitoredBody{ReadCloser: resp.Body, p: p, left: left, done: func() {
		p.timer.Stop()
		cancel(nil)
	}, cause: func() error { return context.Cause(ctx) }}
	return resp, nil
}

// stallTimer cancels a request when no data was sent or received for the duration stallTimeout.
type stallTimer struct {
	timer        *time.Timer
	stallTimeout time.Duration
}

// monitoredBody is a request or response body. Each read of data resets a stallTimer, which
// otherwise cancels the request. After left bytes, Read returns an error.
type monitoredBody struct {
	io.ReadCloser
	p     *stallTimer
	left  int64 // remaining bytes; -1 = unlimited
	done  func()
	cause func() error
}

// Read implements io.Reader.
func (b *monitoredBody) Read(p []byte) (int, error) {
	if b.left >= 0 && int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.p.timer.Reset(b.p.stallTimeout)
	}
	if b.left >= 0 {
		if b.left -= int64(n); b.left < 0 {
			b.left = 0
			return 0, errResponseTooLarge
		}
	}
	if err != nil && err != io.EOF && b.cause != nil {
		if cause := b.cause(); cause != nil {
			err = cause
		}
	}
	return n, err
}

// Close implements io.Closer.
func (b *monitoredBody) Close() error {
	err := b.ReadCloser.Close()
	if b.done != nil {
		b.done()
	}
	return err
}

// checksumWriter is an io.Writer that counts and hashes the data, and stores none of it.
type checksumWriter struct {
	h hash.Hash
	n int64
}

// Write implements io.Writer.
func (s *checksumWriter) Write(p []byte) (int, error) {
	s.n += int64(len(p))
	return s.h.Write(p)
}
