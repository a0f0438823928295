package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/raftstore"
)

// maxRequestBytes is the maximum size of a request's JSON body.
const maxRequestBytes = 4096

// httpStatusCode returns the HTTP status code for an error.
func httpStatusCode(err error) int {
	var refused *clusterhttp.RefusedError
	switch {
	case errors.As(err, &refused):
		return refused.Code
	case errors.Is(err, raftstore.ErrUnknownMember):
		return http.StatusNotFound
	case errors.Is(err, raftstore.ErrInvalid), errors.Is(err, raftstore.ErrFutureRevision):
		return http.StatusBadRequest
	case errors.Is(err, raftstore.ErrTooOld):
		return http.StatusPreconditionFailed // only for this error: a joining replica stops at this status
	case errors.Is(err, raftstore.ErrMemberExists), errors.Is(err, raftstore.ErrNoMajority):
		return http.StatusConflict
	case errors.Is(err, raftstore.ErrUnavailable), errors.Is(err, raftstore.ErrNotLeader),
		errors.Is(err, raftstore.ErrTransferFailed),
		errors.Is(err, raftstore.ErrClosed), errors.Is(err, context.DeadlineExceeded):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// writeError answers a request with an error and the status code for it.
func writeError(w http.ResponseWriter, err error) {
	clusterhttp.WriteError(w, httpStatusCode(err), err)
}

// requireMethod reports whether a request has one of the methods. If not, it answers the request
// with status 405.
func requireMethod(w http.ResponseWriter, req *http.Request, methods ...string) bool {
	if slices.Contains(methods, req.Method) {
		return true
	}
	w.Header().Set("Allow", strings.Join(methods, ", "))
	clusterhttp.WriteError(w, http.StatusMethodNotAllowed,
		fmt.Errorf("%s takes %s only", req.URL.Path, strings.Join(methods, " and ")))
	return false
}

// decodePost decodes the JSON body of a POST request into v. An empty body leaves v unchanged. If
// the method or the body is invalid, decodePost answers the request with an error and returns
// false.
func decodePost(w http.ResponseWriter, req *http.Request, v any) bool {
	if !requireMethod(w, req, http.MethodPost) {
		return false
	}
	d := json.NewDecoder(io.LimitReader(req.Body, maxRequestBytes))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil && err != io.EOF {
		clusterhttp.WriteError(w, http.StatusBadRequest, fmt.Errorf("the body of %s: %w", req.URL.Path, err))
		return false
	}
	return true
}

// decodeForwardable is like decodePost. It also returns the body, so that it can be sent to another
// replica.
func decodeForwardable(w http.ResponseWriter, req *http.Request, v any) (raw []byte, ok bool) {
	raw, err := io.ReadAll(io.LimitReader(req.Body, maxRequestBytes))
	if err != nil {
		clusterhttp.WriteError(w, http.StatusBadRequest, err)
		return nil, false
	}
	req.Body = io.NopCloser(bytes.NewReader(raw))
	return raw, decodePost(w, req, v)
}

// copyResponse answers a request with the response of another replica: its status, its content
// type, and at most limit bytes of its body. It closes resp.Body.
func copyResponse(w http.ResponseWriter, resp *http.Response, limit int64) {
	defer resp.Body.Close()
	w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, io.LimitReader(resp.Body, limit))
}
