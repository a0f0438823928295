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

// bounded are the ways to a server of which nothing good is to be expected: a call that moves no byte for a while ends, and
// an answer that is no backup has a size.
type bounded struct {
	ways    http.RoundTripper
	silence time.Duration
}

var errAnswerTooLarge = errors.New("the server's answer is longer than any that is right")

// RoundTrip implements http.RoundTripper.
func (b *bounded) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	stop := func() { cancel(fmt.Errorf("the server neither took nor gave anything for %s", b.silence)) }
	p := &pulse{timer: time.AfterFunc(b.silence, stop), silence: b.silence}
	again := req.Clone(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		again.Body = &beating{ReadCloser: req.Body, p: p, left: -1}
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
	left := int64(answerBytes)
	if req.Method == http.MethodGet && req.URL.RawQuery == "" && resp.StatusCode < 300 {
		left = -1 // a backup: who reads it knows how long it is
	}
	resp.Body = &beating{ReadCloser: resp.Body, p: p, left: left, done: func() { p.timer.Stop(); cancel(nil) }, cause: func() error { return context.Cause(ctx) }}
	return resp, nil
}

// pulse ends a call when nothing has moved for a while.
type pulse struct {
	timer   *time.Timer
	silence time.Duration
}

// beating is a body that tells when it moves.
type beating struct {
	io.ReadCloser
	p     *pulse
	left  int64 // how much may come; -1 = any
	done  func()
	cause func() error
}

// Read implements io.Reader.
func (b *beating) Read(p []byte) (int, error) {
	if b.left >= 0 && int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.p.timer.Reset(b.p.silence)
	}
	if b.left >= 0 {
		if b.left -= int64(n); b.left < 0 {
			b.left = 0
			return 0, errAnswerTooLarge
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
func (b *beating) Close() error {
	err := b.ReadCloser.Close()
	if b.done != nil {
		b.done()
	}
	return err
}

// summing counts what passes and makes a sum of it.
type summing struct {
	h hash.Hash
	n int64
}

// Write implements io.Writer.
func (s *summing) Write(p []byte) (int, error) {
	s.n += int64(len(p))
	return s.h.Write(p)
}
