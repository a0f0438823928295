package endpoints

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"

	"keelson.dev/keelson/controlplane/api"
)

// exchanges is the maximum number of retries of a request after its kind was replaced. The error of
// the last retry is returned.
const exchanges = 8

// withKindOfNow serves a request, and retries it if its kind was replaced by another kind of the
// same name meanwhile. A retry starts from the original request with the current kind, and checks
// the subresource and the scope again. If the definition was recreated, the retry waits until this
// replica serves the new definition. Bodies are kept only for kinds that have a definition
// (withBodyAgain). For other kinds reads are retried, and writes return the error.
func (h *Handler) withKindOfNow(ctx context.Context, req *api.Request, answer func() error) error {
	came := *req
	for n := 0; ; n++ {
		err := answer()
		if err == nil || n == exchanges || !errors.Is(err, api.ErrKindExchanged) || ctx.Err() != nil {
			return err
		}
		if came.Kind.Definition == "" && !reads(came.Verb) {
			return err
		}
		now := h.Kinds.ByResource(came.Kind.GVR())
		if came.Kind.Definition != "" && (now == nil || now == req.Kind) {
			// The definition was deleted. This replica may not serve the recreated definition yet.
			if late := h.CatchUp(ctx); late != nil {
				return late
			}
			now = h.Kinds.ByResource(came.Kind.GVR())
		}
		if now == nil || now == req.Kind || now.Hidden || now.Namespaced != came.Kind.Namespaced ||
			came.Subresource != "" && now.Subresources[came.Subresource] == nil ||
			!serves(now, Target{Namespace: came.Namespace, Name: came.Name, Subresource: came.Subresource}, came.Verb) {
			return err
		}
		*req = came
		req.Kind = now
	}
}

// reads reports whether requests with the verb have no body.
func reads(verb api.Verb) bool {
	return verb == api.VerbGet || verb == api.VerbList || verb == api.VerbWatch
}

// withBodyAgain returns a copy of a request with a body that can be read repeatedly: after EOF, the
// next read starts at the beginning.
func withBodyAgain(r *http.Request) *http.Request {
	if r.Body == nil || r.Body == http.NoBody {
		return r
	}
	again := *r
	again.Body = &bodyAgain{from: r.Body}
	return &again
}

// bodyAgain buffers a request body while it is read for the first time. readBody limits its size.
type bodyAgain struct {
	from io.ReadCloser
	kept bytes.Buffer
	next *bytes.Reader // reads the buffered body from the second time on; nil before
}

func (b *bodyAgain) Read(p []byte) (int, error) {
	if b.next != nil {
		n, err := b.next.Read(p)
		if errors.Is(err, io.EOF) {
			b.next.Reset(b.kept.Bytes())
		}
		return n, err
	}
	n, err := b.from.Read(p)
	b.kept.Write(p[:n])
	if errors.Is(err, io.EOF) {
		b.next = bytes.NewReader(b.kept.Bytes())
	}
	return n, err
}

func (b *bodyAgain) Close() error { return b.from.Close() }
