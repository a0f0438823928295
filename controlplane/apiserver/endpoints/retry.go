package endpoints

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"

	"keelson.dev/keelson/controlplane/api"
)

// maxKindRetries is the maximum number of retries of a request if its kind was replaced meanwhile.
// After the last retry, its error is returned.
const maxKindRetries = 8

// retryWithNewKind serves a request with respond. It retries the request if its kind was meanwhile
// replaced by another kind of the same name. A retry starts from the original request with the
// current kind, and checks the subresource and the scope again. If the definition was recreated,
// the retry waits until this replica serves the new definition. Only bodies of requests for kinds
// with a definition can be read again (withReplayableBody). For other kinds, reads are retried, and
// writes return the error.
func (h *Handler) retryWithNewKind(ctx context.Context, req *api.Request, respond func() error) error {
	came := *req
	for n := 0; ; n++ {
		err := respond()
		if err == nil || n == maxKindRetries || !errors.Is(err, api.ErrKindExchanged) || ctx.Err() != nil {
			return err
		}
		if came.Kind.Serving.Definition == "" && !hasNoBody(came.Verb) {
			return err
		}
		now := h.cfg.Kinds.ByResource(came.Kind.GVR())
		if came.Kind.Serving.Definition != "" && (now == nil || now == req.Kind) {
			// The definition was deleted. This replica may not serve the recreated definition yet.
			if late := h.cfg.CatchUp(ctx); late != nil {
				return late
			}
			now = h.cfg.Kinds.ByResource(came.Kind.GVR())
		}
		if now == nil || now == req.Kind || now.Serving.Hidden || now.Namespaced != came.Kind.Namespaced ||
			came.Subresource != "" && now.Subresources[came.Subresource] == nil ||
			!supportsVerb(now, Target{Namespace: came.Namespace, Name: came.Name, Subresource: came.Subresource},
				came.Verb) {
			return err
		}
		*req = came
		req.Kind = now
	}
}

// hasNoBody reports whether requests with the verb have no body.
func hasNoBody(verb api.Verb) bool {
	return verb == api.VerbGet || verb == api.VerbList || verb == api.VerbWatch
}

// withReplayableBody returns a copy of a request with a body that can be read repeatedly: after
// EOF, the next read starts at the beginning.
func withReplayableBody(r *http.Request) *http.Request {
	if r.Body == nil || r.Body == http.NoBody {
		return r
	}
	again := *r
	again.Body = &replayableBody{source: r.Body}
	return &again
}

// replayableBody buffers a request body while it is read for the first time. readBody limits its
// size.
type replayableBody struct {
	source   io.ReadCloser
	buffered bytes.Buffer
	next     *bytes.Reader // reads the buffered body from the second time on; nil before
}

func (b *replayableBody) Read(p []byte) (int, error) {
	if b.next != nil {
		n, err := b.next.Read(p)
		if errors.Is(err, io.EOF) {
			b.next.Reset(b.buffered.Bytes())
		}
		return n, err
	}
	n, err := b.source.Read(p)
	b.buffered.Write(p[:n])
	if errors.Is(err, io.EOF) {
		b.next = bytes.NewReader(b.buffered.Bytes())
	}
	return n, err
}

func (b *replayableBody) Close() error { return b.source.Close() }
