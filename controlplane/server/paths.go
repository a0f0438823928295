package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

func goVersion() string { return runtime.Version() }

// lateStreams reaches the fleet, which is made after the apiserver that uses it.
type lateStreams struct{ r *Replica }

func (l lateStreams) Logs(ctx context.Context, node string, q api.LogRequest) (io.ReadCloser, error) {
	return l.r.fleet.Logs(ctx, node, q)
}

func (l lateStreams) Exec(ctx context.Context, node string, q api.ExecRequest, s api.Streams) error {
	return l.r.fleet.Exec(ctx, node, q, s)
}

func (l lateStreams) PortForward(ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser) error {
	return l.r.fleet.PortForward(ctx, node, pod, port, conn)
}

// DialNode implements api.NodeDialer.
func (l lateStreams) DialNode(ctx context.Context, node string, pod types.UID, address string, port int32) (net.Conn, error) {
	return l.r.fleet.DialNode(ctx, node, pod, address, port)
}

// CallDriver implements api.NodeDrivers.
func (l lateStreams) CallDriver(ctx context.Context, node, driver, method string, request []byte, confirm func(context.Context) error) ([]byte, error) {
	return l.r.fleet.CallDriver(ctx, node, driver, method, request, confirm)
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client has gone when this fails
}

// refuse answers as the resources do, so that every client shows the message.
func refuse(w http.ResponseWriter, code int, err error) {
	reason := metav1.StatusReasonUnknown
	switch code {
	case http.StatusBadRequest:
		reason = metav1.StatusReasonBadRequest
	case http.StatusNotFound:
		reason = metav1.StatusReasonNotFound
	case http.StatusMethodNotAllowed:
		reason = metav1.StatusReasonMethodNotAllowed
	case http.StatusConflict:
		reason = metav1.StatusReasonConflict
	case http.StatusServiceUnavailable:
		reason = metav1.StatusReasonServiceUnavailable
	case http.StatusInternalServerError:
		reason = metav1.StatusReasonInternalError
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: err.Error(),
	})
}

// refuseStore answers with what an error of the store means to a caller.
func refuseStore(w http.ResponseWriter, err error) {
	code := http.StatusInternalServerError
	switch {
	case errors.Is(err, raftstore.ErrUnknownMember):
		code = http.StatusNotFound
	case errors.Is(err, raftstore.ErrInvalid), errors.Is(err, raftstore.ErrFutureRevision):
		code = http.StatusBadRequest
	case errors.Is(err, raftstore.ErrTooOld):
		code = http.StatusPreconditionFailed // and nothing else is: see becomeMember
	case errors.Is(err, raftstore.ErrMemberExists), errors.Is(err, raftstore.ErrNoMajority):
		code = http.StatusConflict
	case errors.Is(err, raftstore.ErrUnavailable), errors.Is(err, raftstore.ErrNotLeader), errors.Is(err, raftstore.ErrTransferFailed),
		errors.Is(err, raftstore.ErrClosed), errors.Is(err, context.DeadlineExceeded):
		code = http.StatusServiceUnavailable
	}
	refuse(w, code, err)
}

// only says whether the request has the method, and refuses it otherwise.
func only(w http.ResponseWriter, req *http.Request, methods ...string) bool {
	if slices.Contains(methods, req.Method) {
		return true
	}
	w.Header().Set("Allow", strings.Join(methods, ", "))
	refuse(w, http.StatusMethodNotAllowed, fmt.Errorf("%s takes %s only", req.URL.Path, strings.Join(methods, " and ")))
	return false
}

// posted reads a small JSON body into q. An empty one leaves it as it is.
func posted(w http.ResponseWriter, req *http.Request, q any) bool {
	if !only(w, req, http.MethodPost) {
		return false
	}
	d := json.NewDecoder(io.LimitReader(req.Body, 4096))
	d.DisallowUnknownFields()
	if err := d.Decode(q); err != nil && err != io.EOF {
		refuse(w, http.StatusBadRequest, fmt.Errorf("the body of %s: %w", req.URL.Path, err))
		return false
	}
	return true
}

// postedRaw is posted, with the body as it came: another replica may be asked instead.
func postedRaw(w http.ResponseWriter, req *http.Request, q any) (raw []byte, ok bool) {
	raw, err := io.ReadAll(io.LimitReader(req.Body, 4096))
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return nil, false
	}
	req.Body = io.NopCloser(bytes.NewReader(raw))
	return raw, posted(w, req, q)
}
